#include "core/comm/shm/wait_graph.h"

#include <algorithm>
#include <vector>

namespace accelerate_cpp::comm {

bool waits_for(const Group& group, int rank, int target, bool unlooked_counts) {
  std::vector<bool> seen(static_cast<std::size_t>(group.size()), false);
  std::vector<int> to_visit = {rank};
  while (!to_visit.empty()) {
    const int current = to_visit.back();
    to_visit.pop_back();
    if (seen[static_cast<std::size_t>(current)]) {
      continue;
    }
    seen[static_cast<std::size_t>(current)] = true;
    const RankControl& control = group.control(current);
    for (const auto* const edge : {&control.awaited_in_transfer, &control.awaited_in_collective}) {
      const std::uint32_t awaited = edge->load(std::memory_order_seq_cst);
      if (edge == &control.awaited_in_transfer && !unlooked_counts &&
          control.doorbell_seen.load(std::memory_order_seq_cst) !=
              control.doorbell.value.load(std::memory_order_seq_cst)) {
        continue;
      }
      if (awaited == RankControl::kAnybody || awaited == static_cast<std::uint32_t>(target) + 1) {
        return true;
      }
      // A peer's memory may be damaged.
      if (awaited != RankControl::kNobody && awaited <= static_cast<std::uint32_t>(group.size())) {
        to_visit.push_back(static_cast<int>(awaited) - 1);
      }
    }
  }
  return false;
}

bool PublishedWaits::Wait::set(std::uint32_t for_whom) {
  if (for_whom == for_whom_) {
    return false;
  }
  const std::lock_guard lock(waits_.mutex_);
  std::list<std::uint32_t>& all = waits_.waits_;
  if (const auto old = std::find(all.begin(), all.end(), for_whom_); old != all.end()) {
    all.erase(old);
  }
  if (for_whom != RankControl::kNobody) {
    all.push_back(for_whom);
  }
  for_whom_ = for_whom;
  waits_.own_.awaited_in_transfer.store(all.empty() ? RankControl::kNobody : all.back(), std::memory_order_seq_cst);
  return true;
}

}  // namespace accelerate_cpp::comm
