# XLA's header for custom calls, which jaxlib carries: the folder ACCELERATE_XLA_INCLUDE, or nothing. jaxlib is not
# imported: an isolated build cannot, and its folder says enough.
if(NOT ACCELERATE_XLA_INCLUDE)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
                          "import importlib.util as u, sysconfig as s, os; f = u.find_spec('jaxlib'); p = f.submodule_search_locations[0] if f else os.path.join(s.get_path('platlib'), 'jaxlib'); print(os.path.join(p, 'include'))"
                  OUTPUT_VARIABLE jaxlib_include OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS "${jaxlib_include}/xla/ffi/api/ffi.h")
    set(ACCELERATE_XLA_INCLUDE "${jaxlib_include}")
  endif()
endif()
if(ACCELERATE_XLA_INCLUDE)
  message(STATUS "Building custom calls of XLA against ${ACCELERATE_XLA_INCLUDE}")
else()
  message(STATUS "jaxlib was not found: accelerate_cpp.jax will not work (pip install jax, then build again)")
endif()
