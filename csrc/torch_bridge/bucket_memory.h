// The memory of gradient buckets as tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

// Zeros, `count` of them, for a bucket.
using BucketAllocator = std::function<at::Tensor(std::int64_t count, const at::TensorOptions& options)>;

inline at::Tensor torch_bucket(std::int64_t count, const at::TensorOptions& options) {
  return at::zeros({count}, options);
}

// The memory of each bucket, on the device of the first of its `parameters` and of its dtype, complex ones being pairs.
inline std::vector<at::Tensor> bucket_memories(const std::vector<BucketSpec>& buckets,
                                               const std::vector<std::vector<at::Tensor>>& parameters,
                                               const BucketAllocator& allocate = torch_bucket) {
  std::vector<at::Tensor> memories;
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    const at::Tensor& first = parameters.at(index).at(0);
    memories.push_back(allocate(static_cast<std::int64_t>(buckets[index].count),
                                first.options().dtype(c10::toRealValueType(first.scalar_type())).requires_grad(false)));
  }
  return memories;
}

}  // namespace accelerate_cpp::grad
