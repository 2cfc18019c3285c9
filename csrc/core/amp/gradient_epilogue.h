// The work on a gradient between the backward pass and the optimizer, in one pass over its memory: multiply it, count
// what is not finite, and sum its squares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/memory_view.h"

namespace accelerate_cpp::amp {

struct GradientStatistics {
  double sum_of_squares = 0.0;  // not finite when an element is not
  std::uint64_t num_non_finite = 0;

  GradientStatistics& operator+=(const GradientStatistics& other) {
    sum_of_squares += other.sum_of_squares;
    num_non_finite += other.num_non_finite;
    return *this;
  }
};

// Multiplies every element by `factor`, which is finite, and returns the statistics of the products, before half and
// bfloat16 are rounded. Floating dtypes only: throws InvalidArgument for others. Squares are summed in double, in an
// order that depends on the number of elements alone.
GradientStatistics scale_gradient(MemoryView gradient, double factor);

// The statistics of the elements as they are.
GradientStatistics measure_gradient(ConstMemoryView gradient);

// The same for one instruction set, without checks; `writes` says whether products are stored.
struct EpilogueKernels {
  const char* instruction_set;
  GradientStatistics (*run)(DType dtype, void* data, std::size_t count, double factor, bool writes);
};

// The instruction sets that this processor can run, the best first. "avx512" and "avx2" give the same bits; "portable"
// may round the sum of the squares of halves differently.
std::vector<EpilogueKernels> present_epilogue_kernels();

}  // namespace accelerate_cpp::amp
