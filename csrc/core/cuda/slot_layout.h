// The layout that the host and the kernels of slot_kernels.h share. Both compile this file, so it includes nothing.
#pragma once

namespace accelerate_cpp::cuda {

// Threads of a block; a power of two.
inline constexpr unsigned kBlockThreads = 256;

// The most elements of a slot that one block takes.
inline constexpr unsigned kChunkElements = 16384;

// Consecutive elements of one slot of a bucket.
struct Chunk {
  unsigned long long offset;  // of the first one, in elements from the start of the bucket
  unsigned int count;
  unsigned int unused;
};
static_assert(sizeof(Chunk) == 16);

// Statistics of some elements, like amp::GradientStatistics.
struct Partial {
  double sum_of_squares;
  unsigned long long num_non_finite;
};
static_assert(sizeof(Partial) == 16);

}  // namespace accelerate_cpp::cuda
