# The torch to build against, as the target torch_headers_and_libraries. torch's own CMake package is not used: under a CUDA
# build of torch it demands the CUDA toolkit and links libtorch_cuda, and this module must load under either build.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT ACCELERATE_TORCH_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
                          "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
                  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
else()
  set(torch_dir "${ACCELERATE_TORCH_DIR}")
endif()
if(NOT EXISTS "${torch_dir}/version.py")
  message(FATAL_ERROR "accelerate-cpp is built against an installed torch, and '${Python_EXECUTABLE}' has none. "
                      "Install it first (pip install torch==2.13.0), then build again; or pass -DACCELERATE_TORCH_DIR=<folder of torch>")
endif()
file(STRINGS "${torch_dir}/version.py" torch_version_line REGEX "__version__ *=")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" ACCELERATE_TORCH_VERSION "${torch_version_line}")
message(STATUS "Building against torch ${ACCELERATE_TORCH_VERSION} in ${torch_dir}")

# torch's own copy of pybind11 is used: with another one, types such as c10d::Store would not convert.
add_library(torch_headers_and_libraries INTERFACE)
target_include_directories(torch_headers_and_libraries SYSTEM INTERFACE "${torch_dir}/include"
                           "${torch_dir}/include/torch/csrc/api/include")
target_compile_definitions(torch_headers_and_libraries INTERFACE USE_DISTRIBUTED)
foreach(library torch_cpu c10)
  find_library(torch_${library}_path NAMES ${library} PATHS "${torch_dir}/lib" NO_DEFAULT_PATH REQUIRED)
  target_link_libraries(torch_headers_and_libraries INTERFACE "${torch_${library}_path}")
endforeach()
find_library(ACCELERATE_TORCH_PYTHON NAMES torch_python PATHS "${torch_dir}/lib" NO_DEFAULT_PATH REQUIRED)
