# Compiles through ccache when it is installed.
find_program(ACCELERATE_CCACHE ccache)
if(ACCELERATE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${ACCELERATE_CCACHE}")
endif()
