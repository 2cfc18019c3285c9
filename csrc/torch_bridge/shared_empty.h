// Tensors in memory that processes of this host share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace accelerate_cpp::comm {

// A CPU tensor of zeros on which the collectives of every group of this process need no staging copy; its memory is
// freed with its last view. Throws InvalidArgument for a shape that no tensor has, SystemFailure when there is too
// little memory.
at::Tensor shared_empty(const std::vector<std::int64_t>& size, at::ScalarType dtype);

// Whether the elements of `tensor` lie in such memory.
bool is_shared_tensor(const at::Tensor& tensor);

}  // namespace accelerate_cpp::comm
