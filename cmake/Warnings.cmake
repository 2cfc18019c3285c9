# Warnings for our own targets: link against accelerate_warnings.
add_library(accelerate_warnings INTERFACE)
target_compile_options(accelerate_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
                                                     -Wno-missing-field-initializers)
if(ACCELERATE_WARNINGS_AS_ERRORS)
  target_compile_options(accelerate_warnings INTERFACE -Werror)
endif()
# GCC 12 warns of overlap inside std::string's own operator+ (its bug 105329).
target_compile_options(accelerate_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
