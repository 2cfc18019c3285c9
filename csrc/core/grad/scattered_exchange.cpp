#include "core/grad/scattered_exchange.h"

#include <array>
#include <utility>

#include "core/base/check.h"
#include "core/base/view_parts.h"
#include "core/comm/copy.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::grad {

void ScatteredExchange::begin(Deadline deadline) {
  shares_.clear();
  open_ = false;
  start_round(deadline);
}

MemoryView ScatteredExchange::open(Deadline deadline) {
  const std::size_t index = shares_.size();
  ACCELERATE_CHECK(!open_ && index < buckets_.size(), "there is a bucket left to open");
  void* const memory = free_memory(index, deadline);
  open_ = true;
  return {memory, num_ranks_ * buckets_[index].block, buckets_[index].dtype};
}

void ScatteredExchange::publish(std::vector<Share> shares) {
  ACCELERATE_CHECK(std::exchange(open_, false), "a bucket is opened before it is published");
  ACCELERATE_CHECK(shares.size() == buckets_[shares_.size()].slots.size(), "each slot has a share");
  shares_.push_back(std::move(shares));
  hand_over(shares_.size() - 1);
}

void ScatteredExchange::finish(MemoryView used, Deadline deadline) {
  ACCELERATE_CHECK(shares_.size() == buckets_.size(), "all buckets are published");
  complete(used, deadline);
}

void deliver(const ScatteredBucket& bucket, const std::vector<Share>& shares, ConstMemoryView averages) {
  for (std::size_t slot = 0; slot < shares.size(); ++slot) {
    const SlotSpan& span = bucket.slots[slot];
    const ConstMemoryView part = within(averages, span.offset, span.count);
    void* const to = shares[slot].data;
    if (part.count == 0) {
      continue;
    }
    if (shares[slot].adds) {
      const std::array<const void*, 2> terms{to, part.data};
      comm::reduce(part.dtype, comm::ReduceOp::kSum, {terms.data(), 2, &shares[slot].data, 1, part.count, 1.0});
    } else {
      comm::copy(to, part.data, part.size_bytes(), comm::Residency::kCached);
    }
  }
}

}  // namespace accelerate_cpp::grad
