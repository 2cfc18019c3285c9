# ACCELERATE_SANITIZE instruments every target of the build.
if(ACCELERATE_SANITIZE)
  list(JOIN ACCELERATE_SANITIZE "," accelerate_sanitizers)
  add_compile_options(-fsanitize=${accelerate_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=${accelerate_sanitizers})
endif()
