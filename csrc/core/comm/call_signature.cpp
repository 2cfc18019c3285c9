#include "core/comm/call_signature.h"

namespace accelerate_cpp::comm {

const char* name(CallKind kind) {
  switch (kind) {
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kGather:
      return "gather";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kSplit:
      return "split";
    case CallKind::kWindow:
      return "window";
    case CallKind::kMeeting:
      return "meeting";
    case CallKind::kGradients:
      return "gradient averaging";
    case CallKind::kWithdrawal:
      return "withdrawal";
    case CallKind::kSend:
      return "send";
    case CallKind::kReceive:
      return "receive";
  }
  return "unknown operation";
}

bool CallSignature::agrees_with(const CallSignature& other, bool sized) const {
  return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
         (sized || count == other.count) && round == other.round && shape == other.shape;
}

std::string CallSignature::describe(const WaitHooks& names) const {
  std::string text = name(kind);
  switch (kind) {
    case CallKind::kBarrier:
    case CallKind::kSplit:
    case CallKind::kMeeting:
    case CallKind::kWithdrawal:
      return text;
    case CallKind::kWindow:
      return text + " of " + std::to_string(count) + " bytes";
    case CallKind::kGradients:
      return (op == ReduceOp::kPreMulSum ? "weighted " : "") + text + " of " + std::to_string(count) +
             " buckets (round " + std::to_string(round & 0xffffffffu) + ")";
    case CallKind::kAllReduce:
    case CallKind::kReduce:
    case CallKind::kReduceScatter:
      text += std::string("(") + comm::name(op) + ")";
      break;
    default:
      break;
  }
  text += " of " + (shape.known() ? shape.to_string() : std::to_string(count)) + " " + accelerate_cpp::name(dtype);
  return root < 0 ? text : text + ", root " + std::to_string(names.number_of(root));
}

}  // namespace accelerate_cpp::comm
