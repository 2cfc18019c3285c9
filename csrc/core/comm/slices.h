// How an array is divided among ranks: contiguous slices, equal in size except for the last ones, cut at multiples of
// 64 bytes so that no two ranks write to one cache line.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/comm/options.h"

namespace accelerate_cpp::comm {

class Slices {
 public:
  Slices(std::size_t count, std::size_t element_bytes, int num_slices) : count_(count) {
    const std::size_t step = 64 / element_bytes;
    const auto parts = static_cast<std::size_t>(num_slices);
    const std::size_t even = (count + parts - 1) / parts;
    slice_ = (even + step - 1) / step * step;
  }

  // First element of slice `rank`, and how many it has (possibly none).
  std::size_t begin(int rank) const { return std::min(static_cast<std::size_t>(rank) * slice_, count_); }
  std::size_t count(int rank) const { return begin(rank + 1) - begin(rank); }

 private:
  std::size_t count_;
  std::size_t slice_;
};

// What a combined value is multiplied with: averages are sums scaled once.
inline double reduction_scale(ReduceOp op, int size) {
  return op == ReduceOp::kAvg ? 1.0 / size : 1.0;
}

}  // namespace accelerate_cpp::comm
