// The sum of sparse tensors over all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

// Afterwards `tensor`, sparse in coordinate format and on the CPU, holds the sum (or, with kAvg, the average) over all
// ranks, coalesced and bitwise equal on all of them. The number of stored elements may differ between ranks. Throws
// InvalidArgument for other layouts and reductions.
void sparse_all_reduce(Communicator& communicator, const at::Tensor& tensor, const Reduction& reduction,
                       const Call& call);

}  // namespace accelerate_cpp::comm
