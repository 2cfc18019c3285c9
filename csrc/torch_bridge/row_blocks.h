// Buckets of gradients that are to be reduced into the rows of each rank: one block per rank, all of one size, in which
// every gradient has a place for that rank's rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace accelerate_cpp::grad {

// Copies `gradient`, of the dtype of `bucket`, to `offset` in each of `num_blocks` blocks: `elements` of it to the
// first, as many to the second, and so on; the last ones get what is left, possibly nothing, and keep what they had
// behind it. Throws InvalidArgument where it does not fit.
void copy_into_blocks(const at::Tensor& gradient, const at::Tensor& bucket, std::int64_t offset, std::int64_t elements,
                      std::int64_t num_blocks);

}  // namespace accelerate_cpp::grad
