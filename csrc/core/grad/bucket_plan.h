// Which parameter's gradient goes into which bucket, and where: pure arithmetic, the same on every rank.
#pragma once

#include <cstddef>
#include <vector>

#include "core/base/dtype.h"

namespace accelerate_cpp::grad {

struct ParameterSpec {
  DType dtype;
  std::size_t count;  // elements
};

// The place of one parameter.
struct Slot {
  std::size_t bucket;
  std::size_t index;   // among the slots of its bucket
  std::size_t offset;  // elements from the start of the bucket; a multiple of 64 bytes
};

struct BucketLayout {
  DType dtype;
  std::size_t count;                    // elements, padding included
  std::vector<std::size_t> parameters;  // in the order of their slots
};

struct BucketPlan {
  std::vector<BucketLayout> buckets;  // in the order in which they get their first gradient
  std::vector<Slot> slots;            // by parameter
};

// Fills buckets in the order given by `order` (a permutation of the parameters: expected arrival of their gradients). A
// bucket holds one dtype and at most `cap_bytes`, the first one at most `first_cap_bytes`, so that reduction can start
// early; a parameter larger than that has a bucket to itself. Throws InvalidArgument when `order` is no permutation or
// a cap is 0.
BucketPlan plan_buckets(const std::vector<ParameterSpec>& parameters, const std::vector<std::size_t>& order,
                        std::size_t first_cap_bytes, std::size_t cap_bytes);

}  // namespace accelerate_cpp::grad
