// Buckets of gradients that are summed over all ranks, of which each rank gets the averages of its own share alone.
//
// A bucket is one block per rank, all of one size: the block of a rank has what is to be averaged into that rank's
// share. One round: every rank calls begin(), opens, fills and publishes the buckets one after the other, all ranks in
// the same order, and finish() returns when the averages are where publish() was told to put them. The memory of a few
// buckets is used again and again, so a rank holds no more than these of what it gives to the others. One thread at a
// time.
//
// A round that a rank cannot finish is an interruption of its communicator: no rank finishes it.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

struct ScatteredBucket {
  DType dtype;
  std::size_t block;            // elements of the block of each rank, with those between slots, which mean nothing
  std::vector<SlotSpan> slots;  // in the block of this rank; other ranks may have fewer or more elements in a slot
};

// Where the averages of one slot go: to as many elements as the slot has.
struct Share {
  void* data = nullptr;
  bool adds = false;  // to what is there, instead of replacing it
};

class ScatteredExchange {
 public:
  ScatteredExchange(std::vector<ScatteredBucket> buckets, int num_ranks)
      : buckets_(std::move(buckets)), num_ranks_(static_cast<std::size_t>(num_ranks)) {}
  virtual ~ScatteredExchange() = default;
  ScatteredExchange(const ScatteredExchange&) = delete;
  ScatteredExchange& operator=(const ScatteredExchange&) = delete;

  // An unfinished round is discarded; returns once no rank works on it any more.
  void begin(Deadline deadline);

  // The memory of the next bucket, the blocks in the order of ranks, for the caller to fill until publish(). What it
  // holds means nothing. Waits until all ranks have read what it held before.
  MemoryView open(Deadline deadline);

  // The bucket that was opened last is complete. `shares`, by slot, receive this rank's averages by the end of
  // finish(). Never blocks on a host; between hosts it may.
  void publish(std::vector<Share> shares);

  // Works on buckets that all ranks have published. Never blocks.
  virtual void progress() {}

  // Waits for the averages; every bucket must have been published. `used` are bytes, as many on every rank, which are
  // replaced by their maxima over the ranks. Errors as in Communicator.
  void finish(MemoryView used, Deadline deadline);

 protected:
  const std::vector<ScatteredBucket>& buckets() const { return buckets_; }
  std::size_t num_ranks() const { return num_ranks_; }
  std::size_t size_bytes(const ScatteredBucket& bucket) const {
    return num_ranks_ * bucket.block * element_size(bucket.dtype);
  }
  // Of a bucket that is published in this round.
  const std::vector<Share>& shares(std::size_t index) const { return shares_[index]; }

 private:
  virtual void start_round(Deadline deadline) = 0;
  // The memory of a bucket, once nobody uses it.
  virtual void* free_memory(std::size_t index, Deadline deadline) = 0;
  // The bucket has just been published.
  virtual void hand_over(std::size_t index) = 0;
  // All buckets are published.
  virtual void complete(MemoryView used, Deadline deadline) = 0;

  const std::vector<ScatteredBucket> buckets_;
  const std::size_t num_ranks_;
  std::vector<std::vector<Share>> shares_;  // of the buckets that are published in this round
  bool open_ = false;                       // the next one
};

// Puts `averages`, of this rank's block of `bucket`, where they belong.
void deliver(const ScatteredBucket& bucket, const std::vector<Share>& shares, ConstMemoryView averages);

}  // namespace accelerate_cpp::grad
