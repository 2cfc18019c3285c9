// The memory of gradient buckets as tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

// Zeros for each bucket, on the device of the first of its `parameters` and of its dtype, complex ones being pairs.
inline std::vector<at::Tensor> bucket_memories(const std::vector<BucketSpec>& buckets,
                                               const std::vector<std::vector<at::Tensor>>& parameters) {
  std::vector<at::Tensor> memories;
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    const at::Tensor& first = parameters.at(index).at(0);
    memories.push_back(
        at::zeros({static_cast<std::int64_t>(buckets[index].count)},
                  first.options().dtype(c10::toRealValueType(first.scalar_type())).requires_grad(false)));
  }
  return memories;
}

}  // namespace accelerate_cpp::grad
