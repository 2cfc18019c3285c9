// What the host and the kernels of slot_kernels.h have in common. Both compile this file, so it includes nothing.
#pragma once

namespace accelerate_cpp::cuda {

// Threads of a block; a power of two.
inline constexpr unsigned kBlockThreads = 256;

// What one block takes of a slot at most.
inline constexpr unsigned kChunkElements = 16384;

// Consecutive elements of one slot of a bucket.
struct Chunk {
  unsigned long long offset;  // of the first one, in elements from the start of the bucket
  unsigned int count;
  unsigned int unused;
};
static_assert(sizeof(Chunk) == 16);

// What some elements are like, as amp::GradientStatistics has it.
struct Partial {
  double sum_of_squares;
  unsigned long long num_non_finite;
};
static_assert(sizeof(Partial) == 16);

}  // namespace accelerate_cpp::cuda
