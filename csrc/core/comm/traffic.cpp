#include "core/comm/traffic.h"

namespace accelerate_cpp::comm {

void Traffic::add(CallKind kind, std::size_t size_bytes) noexcept {
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
      found.emplace(name(static_cast<CallKind>(kind)), total);
    }
  }
  return found;
}

}  // namespace accelerate_cpp::comm
