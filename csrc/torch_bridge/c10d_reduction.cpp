#include "torch_bridge/c10d_reduction.h"

#include <string>

#include "core/base/error.h"
#include "torch_bridge/torch_versions.h"

namespace accelerate_cpp::comm {
namespace {

double factor_of(const ::c10d::ReduceOp& op) {
  const auto* const supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    throw InvalidArgument(
        "PREMUL_SUM needs a factor: make the operation with torch.distributed._make_nccl_premul_sum(factor)");
  }
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item().toDouble() : supplement->double_factor;
}

}  // namespace

Reduction reduction_of(const ::c10d::ReduceOp& op, bool is_complex) {
  const auto kind = static_cast<::c10d::ReduceOp::RedOpType>(op);
  const bool for_complex =
      kind == ::c10d::ReduceOp::SUM || kind == ::c10d::ReduceOp::AVG || kind == ::c10d::ReduceOp::PREMUL_SUM;
  if (is_complex && !for_complex) {
    throw InvalidArgument("complex tensors can be combined with SUM, AVG and PREMUL_SUM only");
  }
  switch (kind) {
    case ::c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case ::c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case ::c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case ::c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    case ::c10d::ReduceOp::PREMUL_SUM:
      return {ReduceOp::kPreMulSum, factor_of(op)};
    default:
      throw InvalidArgument(
          "this reduction is not available on backend shm; expected SUM, AVG, MIN, MAX, PRODUCT, BAND, "
          "BOR, BXOR or PREMUL_SUM");
  }
}

}  // namespace accelerate_cpp::comm
