# Adds to `target` a source that defines the `const char* const` called `variable`, in namespace accelerate_cpp::cuda, as the
# text of `file`. Changes of the file configure anew.
function(accelerate_embed_text target header variable file)
  file(READ "${file}" text)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/${variable}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"@header@\"

namespace accelerate_cpp::cuda {

const char* const @variable@ = R\"source(@text@)source\";

}  // namespace accelerate_cpp::cuda
" @ONLY)
  target_sources(${target} PRIVATE "${source}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
endfunction()
