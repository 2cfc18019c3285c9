// A stand-in for the CUDA driver and for NVRTC, whose device is this process: its memory is the host's, and a launched
// kernel of slot_kernels.h has run, on threads of the host, when the launch returns. Any thread may call it; tests look
// at it when none does.
//
// Built as a shared library that has the entry points of both; tests reach into it through cuda_double().
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/cuda/driver_api.h"

#if !defined(ACCELERATE_CUDA_DOUBLE)
#error "the build defines where the double is"
#endif

namespace accelerate_cpp::cuda::testing {

struct Launch {
  std::string kernel;
  unsigned num_blocks;
  Stream stream;
};

class __attribute__((visibility("default"))) CudaDouble {
 public:
  int capability = 90;                        // of every device
  std::vector<int> capabilities{75, 90, 80};  // for which the compiler compiles
  std::map<std::string, int> failures;        // by entry point, what it returns instead of doing anything

  std::vector<std::string> compiled;  // the architectures
  std::vector<std::string> loaded;    // the images
  std::vector<Launch> launches;
  std::vector<std::string> problems;  // what was done wrong

  void reset();
  // In this thread, which has pushed them.
  int num_contexts() const;
};

__attribute__((visibility("default"))) CudaDouble& cuda_double();

}  // namespace accelerate_cpp::cuda::testing
