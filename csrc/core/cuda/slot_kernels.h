// The kernels that multiply and measure the slots of a gradient bucket on a GPU, in one pass over its memory: the sum
// of the squares and the number of non-finite elements of each slot, as amp::scale_gradient() has them on the host.
//
// This is CUDA C++, which the library carries as text and hands to NVRTC on the machine with the GPU
// (kernel_compiler.h). It is also C++: tests run it on threads of the host, where core/cuda/grid_on_threads.h declares
// what CUDA has built in.
//
// Two kernels follow one another on a stream. In the first, a block of threads takes one chunk: each thread sums what
// it meets, in double, and the sums of the threads are added up pairwise. In the second, a block adds up the chunks of
// one slot in the same way. Nothing is added atomically: the order depends on the numbers of elements alone, so that
// equal buckets have equal statistics on every rank and in every run.
#pragma once

#include "core/cuda/slot_layout.h"

#if defined(__CUDACC__)

namespace accelerate_cpp {

struct Float16 {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

__device__ inline float to_float(Float16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.bits));
  return value;
}

__device__ inline Float16 to_float16(float value) {
  Float16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
  return half;
}

__device__ inline float to_float(BFloat16 half) {
  return __uint_as_float(static_cast<unsigned>(half.bits) << 16);
}

// Written out, because there is no instruction for it before compute capability 8.0.
__device__ inline BFloat16 to_bfloat16(float value) {
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<unsigned short>((value != value ? 0x7fc00000u : rounded) >> 16)};
}

}  // namespace accelerate_cpp

#else
#include "core/base/half.h"
#endif

namespace accelerate_cpp::cuda {

__device__ inline float widen(Float16 element) {
  return to_float(element);
}
__device__ inline float widen(BFloat16 element) {
  return to_float(element);
}
__device__ inline float widen(float value) {
  return value;
}
__device__ inline double widen(double value) {
  return value;
}
__device__ inline void narrow(float value, Float16& element) {
  element = to_float16(value);
}
__device__ inline void narrow(float value, BFloat16& element) {
  element = to_bfloat16(value);
}
__device__ inline void narrow(float value, float& element) {
  element = value;
}
__device__ inline void narrow(double value, double& element) {
  element = value;
}

// What one access to memory moves.
template <class T>
struct alignas(16) Row {
  static constexpr unsigned kElements = 16 / sizeof(T);
  T elements[kElements];
};

__device__ inline void add(Partial& sum, const Partial& other) {
  sum.sum_of_squares += other.sum_of_squares;
  sum.num_non_finite += other.num_non_finite;
}

// Multiplies an element, if kWrites, and adds what is stored then to `sum`.
template <bool kWrites, class T>
__device__ inline void take(T& element, double factor, Partial& sum) {
  auto value = widen(element);
  if (kWrites) {
    value *= static_cast<decltype(value)>(factor);
    narrow(value, element);
    value = widen(element);
  }
  sum.sum_of_squares += static_cast<double>(value) * static_cast<double>(value);
  sum.num_non_finite += value - value != 0 ? 1 : 0;
}

template <bool kWrites, class T>
__device__ inline Partial take_own(T* data, unsigned count, double factor) {
  // The number of rows that one thread loads at a time.
  constexpr unsigned kAhead = 4;
  Partial sum{0.0, 0};
  const bool aligned = reinterpret_cast<unsigned long long>(data) % sizeof(Row<T>) == 0;
  const unsigned rows = aligned ? count / Row<T>::kElements : 0;
  auto* const row = reinterpret_cast<Row<T>*>(data);
  for (unsigned first = threadIdx.x; first < rows; first += kAhead * kBlockThreads) {
    Row<T> ahead[kAhead];
    for (unsigned a = 0; a < kAhead; ++a) {
      if (first + a * kBlockThreads < rows) {
        ahead[a] = row[first + a * kBlockThreads];
      }
    }
    for (unsigned a = 0; a < kAhead; ++a) {
      if (first + a * kBlockThreads < rows) {
        for (unsigned e = 0; e < Row<T>::kElements; ++e) {
          take<kWrites>(ahead[a].elements[e], factor, sum);
        }
        if (kWrites) {
          row[first + a * kBlockThreads] = ahead[a];
        }
      }
    }
  }
  for (unsigned i = rows * Row<T>::kElements + threadIdx.x; i < count; i += kBlockThreads) {
    T element = data[i];
    take<kWrites>(element, factor, sum);
    if (kWrites) {
      data[i] = element;
    }
  }
  return sum;
}

// Sums the values of all threads of the block into shared[0], for thread 0 to read. `shared` has room for one of each.
__device__ inline void sum_over_block(const Partial& own, Partial* shared) {
  shared[threadIdx.x] = own;
  for (unsigned width = kBlockThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
      add(shared[threadIdx.x], shared[threadIdx.x + width]);
    }
  }
}

// One block per chunk.
template <bool kWrites, class T>
__device__ inline void take_chunk(void* bucket, const Chunk* chunks, double factor, Partial* partials) {
  __shared__ Partial shared[kBlockThreads];
  const Chunk chunk = chunks[blockIdx.x];
  sum_over_block(take_own<kWrites>(static_cast<T*>(bucket) + chunk.offset, chunk.count, factor), shared);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = shared[0];
  }
}

}  // namespace accelerate_cpp::cuda

#define ACCELERATE_SLOT_KERNELS(dtype, T)                                                     \
  extern "C" __global__ void __launch_bounds__(accelerate_cpp::cuda::kBlockThreads)           \
      measure_##dtype(void* bucket, const accelerate_cpp::cuda::Chunk* chunks, double factor, \
                      accelerate_cpp::cuda::Partial* partials) {                              \
    accelerate_cpp::cuda::take_chunk<false, T>(bucket, chunks, factor, partials);             \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(accelerate_cpp::cuda::kBlockThreads)           \
      scale_##dtype(void* bucket, const accelerate_cpp::cuda::Chunk* chunks, double factor,   \
                    accelerate_cpp::cuda::Partial* partials) {                                \
    accelerate_cpp::cuda::take_chunk<true, T>(bucket, chunks, factor, partials);              \
  }

ACCELERATE_SLOT_KERNELS(float32, float)
ACCELERATE_SLOT_KERNELS(float64, double)
ACCELERATE_SLOT_KERNELS(float16, accelerate_cpp::Float16)
ACCELERATE_SLOT_KERNELS(bfloat16, accelerate_cpp::BFloat16)

// One block per slot. The chunks of slot s are those from first_chunks[s] to first_chunks[s + 1]; its row of the result
// is the sum of the squares and the number of non-finite elements.
extern "C" __global__ void __launch_bounds__(accelerate_cpp::cuda::kBlockThreads)
    combine_chunks(const accelerate_cpp::cuda::Partial* partials, const unsigned* first_chunks, double* rows) {
  using namespace accelerate_cpp::cuda;  // NOLINT(google-build-using-namespace)
  __shared__ Partial shared[kBlockThreads];
  Partial own{0.0, 0};
  for (unsigned c = first_chunks[blockIdx.x] + threadIdx.x; c < first_chunks[blockIdx.x + 1]; c += kBlockThreads) {
    add(own, partials[c]);
  }
  sum_over_block(own, shared);
  if (threadIdx.x == 0) {
    rows[2 * blockIdx.x] = shared[0].sum_of_squares;
    rows[2 * blockIdx.x + 1] = static_cast<double>(shared[0].num_non_finite);
  }
}
