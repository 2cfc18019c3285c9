# What the tests of NcclComm need: doubles of NCCL and of the CUDA runtime; and, where they are found, the headers
# of both, with which our declarations of their entry points are compared. The library itself needs none of this.

find_path(ACCELERATE_CUDA_INCLUDE cuda_runtime_api.h
          HINTS ENV CUDA_HOME ENV CUDA_PATH
          PATH_SUFFIXES include cuda/include
          DOC "Folder of the CUDA toolkit's headers, for comparing declarations; may be missing")
find_path(ACCELERATE_NCCL_INCLUDE nccl.h
          HINTS "${Python_SITELIB}/nvidia/nccl/include" ENV NCCL_HOME
          PATH_SUFFIXES include
          DOC "Folder of nccl.h (pip's nvidia-nccl-cu13 has it), for comparing declarations; may be missing")

# Adds the doubles, the tests in core/comm/nccl to `target`, and the executable nccl_device_tests, which is for machines
# with GPUs.
function(accelerate_add_nccl_tests target)
  set(here "${PROJECT_SOURCE_DIR}/tests/cpp/core/comm/nccl")

  add_library(cudart_double SHARED "${here}/cudart_double.cpp")
  add_library(nccl_double SHARED "${here}/nccl_double.cpp" "${here}/nccl_clique.cpp")
  target_link_libraries(nccl_double PUBLIC cudart_double)
  target_compile_definitions(nccl_double INTERFACE "ACCELERATE_NCCL_DOUBLE=\"$<TARGET_FILE:nccl_double>\""
                                                   "ACCELERATE_CUDART_DOUBLE=\"$<TARGET_FILE:cudart_double>\"")
  foreach(double cudart_double nccl_double)
    target_include_directories(${double} PRIVATE "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/tests/cpp")
    target_link_libraries(${double} PRIVATE accelerate_warnings)
  endforeach()

  file(GLOB tests CONFIGURE_DEPENDS "${here}/*_test.cpp")
  list(FILTER tests EXCLUDE REGEX "(declarations|device)_test\\.cpp$")
  target_sources(${target} PRIVATE ${tests})
  target_link_libraries(${target} PRIVATE nccl_double)

  if(ACCELERATE_CUDA_INCLUDE)
    add_library(cuda_declarations OBJECT "${here}/cuda_declarations_test.cpp"
                "${PROJECT_SOURCE_DIR}/tests/cpp/core/cuda/driver_declarations_test.cpp")
    if(ACCELERATE_NCCL_INCLUDE)
      target_sources(cuda_declarations PRIVATE "${here}/nccl_declarations_test.cpp")
    else()
      message(STATUS "nccl.h was not found: our declarations of NCCL are not compared with it")
    endif()
    target_include_directories(cuda_declarations PRIVATE "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_SOURCE_DIR}/tests/cpp")
    target_include_directories(cuda_declarations SYSTEM PRIVATE "${ACCELERATE_CUDA_INCLUDE}"
                               "$<$<BOOL:${ACCELERATE_NCCL_INCLUDE}>:${ACCELERATE_NCCL_INCLUDE}>")
    target_link_libraries(cuda_declarations PRIVATE test_options)
    target_link_libraries(${target} PRIVATE cuda_declarations)
  else()
    message(STATUS "The CUDA toolkit was not found: our declarations of CUDA and NCCL are not compared with its headers")
  endif()

  add_executable(nccl_device_tests "${here}/nccl_device_test.cpp")
  target_include_directories(nccl_device_tests PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  if(Python_SITELIB)
    target_compile_definitions(nccl_device_tests PRIVATE "ACCELERATE_TEST_BESIDE=\"${Python_SITELIB}/torch\"")
  endif()
  target_link_libraries(nccl_device_tests PRIVATE accelerate_core test_options)
  gtest_discover_tests(nccl_device_tests DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()
