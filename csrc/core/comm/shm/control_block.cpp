#include "core/comm/shm/control_block.h"

namespace accelerate_cpp::comm {

const char* name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllReduce:
      return "all_reduce";
    case OperationKind::kReduce:
      return "reduce";
    case OperationKind::kReduceScatter:
      return "reduce_scatter";
    case OperationKind::kBroadcast:
      return "broadcast";
    case OperationKind::kAllGather:
      return "all_gather";
    case OperationKind::kGather:
      return "gather";
    case OperationKind::kScatter:
      return "scatter";
    case OperationKind::kAllToAll:
      return "all_to_all";
    case OperationKind::kBarrier:
      return "barrier";
    case OperationKind::kGradients:
      return "gradient averaging";
    case OperationKind::kWithdrawal:
      return "withdrawal";
    case OperationKind::kMeeting:
      return "meeting";
  }
  return "unknown operation";
}

std::string describe(const Operation& operation) {
  std::string text = name(operation.kind);
  switch (operation.kind) {
    case OperationKind::kBarrier:
    case OperationKind::kWithdrawal:
    case OperationKind::kMeeting:
      return text;
    case OperationKind::kGradients:
      return (operation.reduce_op == ReduceOp::kPreMulSum ? "weighted " : "") + text + " of " +
             std::to_string(operation.count) + " buckets (round " + std::to_string(operation.round & 0xffffffffu) + ")";
    case OperationKind::kAllReduce:
    case OperationKind::kReduce:
    case OperationKind::kReduceScatter:
      text += std::string("(") + name(operation.reduce_op) + ")";
      break;
    default:
      break;
  }
  text += " of " + (operation.shape.known() ? operation.shape.to_string() : std::to_string(operation.count)) + " " +
          accelerate_cpp::name(operation.dtype);
  return operation.root < 0 ? text : text + ", root " + std::to_string(operation.root);
}

}  // namespace accelerate_cpp::comm
