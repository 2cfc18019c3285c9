// What slot_kernels.h takes from CUDA, for the host: a block's threads are threads of the host, which meet at a
// barrier, and blocks run one after the other. So kernels compute here what they do on a GPU but for the rounding of
// fused operations, and a sanitizer sees where two threads of a block touch the same memory without having met.
//
// To be included before slot_kernels.h.
#pragma once

#include <barrier>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cuda/slot_layout.h"

#define __global__
#define __device__
#define __shared__ static  // of the one block that runs
#define __launch_bounds__(threads)

namespace accelerate_cpp::cuda::testing {

struct Index {
  unsigned x;
};

inline std::barrier<>& block_barrier() {
  static std::barrier<> barrier(kBlockThreads);
  return barrier;
}

inline std::mutex& grid_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace accelerate_cpp::cuda::testing

inline thread_local accelerate_cpp::cuda::testing::Index threadIdx{};
inline thread_local accelerate_cpp::cuda::testing::Index blockIdx{};

inline void __syncthreads() {
  accelerate_cpp::cuda::testing::block_barrier().arrive_and_wait();
}

namespace accelerate_cpp::cuda::testing {

// One grid runs at a time, whoever calls.
template <class Kernel, class... Arguments>
void launch(unsigned num_blocks, const Kernel& kernel, Arguments... arguments) {
  const std::lock_guard lock(grid_mutex());
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < kBlockThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx.x = t;
      for (unsigned b = 0; b < num_blocks; ++b) {
        blockIdx.x = b;
        kernel(arguments...);
        __syncthreads();
      }
    });
  }
}

}  // namespace accelerate_cpp::cuda::testing
