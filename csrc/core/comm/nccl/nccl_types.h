// How element types and reductions are said in NCCL, and which of them cannot be.
#pragma once

#include <array>
#include <cstddef>

#include "core/base/dtype.h"
#include "core/comm/nccl/nccl_api.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

struct NcclReduction {
  NcclDataType type;
  NcclRedOp op;  // for a pre-multiplied sum: kSum, to be replaced by an operation made for the factor
  bool premultiplied;
};

// Booleans are bytes of 0 and 1: or (sum, max) is their maximum, and (product, min) their minimum. Throws
// InvalidArgument for what NCCL has no words for: reductions of int16, bitwise ones, xor of booleans; and for what
// check_reduction() refuses.
NcclReduction nccl_reduction(DType dtype, ReduceOp op);

// The factor of a pre-multiplied sum as one element of `dtype`, a floating type.
std::array<std::byte, 8> nccl_factor(DType dtype, double factor);

}  // namespace accelerate_cpp::comm
