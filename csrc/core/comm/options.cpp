#include "core/comm/options.h"

namespace accelerate_cpp::comm {

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kPreMulSum:
      return "premul_sum";
    case ReduceOp::kBitAnd:
      return "band";
    case ReduceOp::kBitOr:
      return "bor";
    case ReduceOp::kBitXor:
      return "bxor";
  }
  return "unknown reduction";
}

}  // namespace accelerate_cpp::comm
