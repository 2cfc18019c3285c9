#include "torch_bridge/sparse_gradient.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims.h>

#include "core/grad/gradient_exchange.h"
#include "torch_bridge/sparse_all_reduce.h"

namespace accelerate_cpp::grad {

at::Tensor average_sparse(comm::Communicator& communicator, const at::Tensor& parameter, const at::Tensor& gradient,
                          double divisor, const comm::Call& call) {
  std::uint8_t used = gradient.defined() ? 1 : 0;
  communicator.all_reduce({&used, 1, DType::kUInt8}, comm::ReduceOp::kMax, call);
  if (used == 0) {
    return {};
  }
  // As embeddings make them: one sparse dimension, of rows.
  at::Tensor sum = gradient.defined()
                       ? gradient.to(at::kCPU, gradient.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                       : at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                                          parameter.options().device(at::kCPU).layout(at::kSparse));
  comm::sparse_all_reduce(communicator, sum, comm::ReduceOp::kSum, call);
  sum._values().mul_(inverse(divisor));
  return sum.to(parameter.device());
}

}  // namespace accelerate_cpp::grad
