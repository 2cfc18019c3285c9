// The gradient of an embedding with sparse=True: the rows that were looked up, which differ between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/comm/communicator.h"

namespace accelerate_cpp::grad {

// Collective. What `gradient` (sparse, or undefined when this rank has none) becomes: the sum over all ranks, divided
// by `divisor` as a gradient exchange divides; coalesced. Undefined when no rank has a gradient of `parameter`.
at::Tensor average_sparse(comm::Communicator& communicator, const at::Tensor& parameter, const at::Tensor& gradient,
                          double divisor, const comm::Call& call);

}  // namespace accelerate_cpp::grad
