#include "core/comm/traffic.h"

namespace accelerate_cpp::comm {

const char* name_of(OperationKind kind) {
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
    case OperationKind::kSend:
      return "send";
    case OperationKind::kReceive:
      return "receive";
  }
  return "";
}

void Traffic::add(OperationKind kind, std::size_t size_bytes) noexcept {
  Counted& counted = counted_[static_cast<std::size_t>(kind)];
  counted.operations.fetch_add(1, std::memory_order_relaxed);
  counted.size_bytes.fetch_add(size_bytes, std::memory_order_relaxed);
}

std::map<std::string, Traffic::Total> Traffic::totals() const {
  std::map<std::string, Total> found;
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    const Total total{counted_[kind].operations.load(std::memory_order_relaxed),
                      counted_[kind].size_bytes.load(std::memory_order_relaxed)};
    if (total.operations != 0) {
      found.emplace(name_of(static_cast<OperationKind>(kind)), total);
    }
  }
  return found;
}

}  // namespace accelerate_cpp::comm
