// Tensors in the memory of a communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

// An uninitialised CPU tensor on which the communicator's collectives need no staging copy. Throws InvalidArgument for
// a shape that no tensor has, SystemFailure when there is too little memory.
at::Tensor shared_empty(Communicator& communicator, const std::vector<std::int64_t>& size, at::ScalarType dtype);

}  // namespace accelerate_cpp::comm
