// Buckets of gradients that all ranks fill during a backward pass and that are averaged in place.
//
// One round: every rank may begin() it, writes its buckets and publishes each when it is complete, in any order;
// finish() returns when the average of every bucket is in place on this rank. Between finish() and the next publish()
// the buckets belong to the caller alone. One thread at a time.
//
// An average is the sum of what the ranks have published, divided by the sum of their weights, each of which is 1
// unless ranks give theirs. This class keeps the order of a round, the weights and the flags of used slots;
// implementations only move and sum.
//
// A round that a rank cannot finish is an interruption of its communicator: no rank finishes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/amp/gradient_epilogue.h"
#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/work_queue.h"

namespace accelerate_cpp::grad {

// Where the gradient of one parameter lies in its bucket, in elements.
struct SlotSpan {
  std::size_t offset = 0;
  std::size_t count = 0;
};

struct BucketSpec {
  DType dtype;
  std::size_t count;            // elements, with those between slots, whose values mean nothing
  std::vector<SlotSpan> slots;  // one after the other
};

struct RoundOptions {
  // What the gradients of this rank weigh, at least 0. All ranks give one (or they get a MismatchedCollective) or none
  // does.
  std::optional<double> weight;
  bool measures = false;  // statistics() are wanted
};

class GradientExchange {
 public:
  explicit GradientExchange(std::vector<BucketSpec> buckets);
  virtual ~GradientExchange() = default;
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // The memory of one bucket, aligned to 64 bytes, stable for the life of the exchange.
  MemoryView bucket(std::size_t index);

  // One byte per slot, written by the caller before publish(): whether this rank has a gradient for it. A slot without
  // one holds zeros when it is published.
  std::uint8_t* used_slots(std::size_t index);

  // After finish(): whether any rank had a gradient for the slot in the finished round.
  bool used_anywhere(std::size_t index, std::size_t slot) const;

  // Call this before the first publish() of a round that has options, or that follows an unfinished round. An
  // unfinished round is discarded; begin() returns once no rank works on it any more. Throws InvalidArgument when the
  // weight is out of its range.
  void begin(const RoundOptions& options, Deadline deadline);

  // After finish(), until the next publish(): statistics of the slot's averages as the reduction left them; equal on
  // all ranks. Empty unless every rank asked for them and the implementation measures.
  std::optional<amp::GradientStatistics> statistics(std::size_t index, std::size_t slot) const;

  // What statistics() would return if `gradient`, with the elements of the slot, were the average; summed in the same
  // order.
  amp::GradientStatistics measure(std::size_t index, std::size_t slot, ConstMemoryView gradient) const;

  // After finish(), until the next publish(): the sum of the weights; 0 when all of them were 0, which makes all
  // averages 0.
  double divisor() const { return divisor_; }

  // This rank's part of the bucket is complete and is not touched until finish() returns. Never blocks.
  void publish(std::size_t index);

  // Works on buckets that all ranks have published. Never blocks.
  virtual void progress() {}

  // Waits for every bucket's average. Every bucket must have been published. Errors as in Communicator; after one, the
  // caller may try again or call begin() for a new round.
  void finish(Deadline deadline);

  // For a communicator that is also used through `queue`: operations wait for those issued there before.
  void set_queue(std::shared_ptr<comm::WorkQueue> queue) { queue_ = std::move(queue); }

 protected:
  const std::vector<BucketSpec>& buckets() const { return buckets_; }
  bool is_published(std::size_t index) const { return published_[index]; }
  const RoundOptions& options() const { return options_; }  // of this round
  double weight() const { return options_.weight.value_or(1.0); }
  comm::WorkQueue* queue() const { return queue_.get(); }  // null: nobody else uses the communicator
  void wait_for_turn() const;
  // The index of the bucket's first slot among all slots. For index num_buckets, the number of all slots.
  std::size_t first_slot(std::size_t index) const { return first_slot_[index]; }

 private:
  virtual void* memory(std::size_t index) = 0;
  // begin() has set options(). May communicate; then calls wait_for_turn() before.
  virtual void start_round(Deadline) { reset_round(); }
  // The next round has begun with options(), and nothing of it is published.
  virtual void reset_round() {}
  // The bucket has just been published.
  virtual void hand_over(std::size_t index) = 0;
  // All buckets are published. Puts the averages in their place, replaces the flags of all slots, which are this
  // rank's, by their maxima over the ranks, and returns the sum of the weights.
  virtual double complete(MemoryView used, Deadline deadline) = 0;
  virtual std::optional<amp::GradientStatistics> measured(std::size_t, std::size_t) const { return std::nullopt; }

  virtual amp::GradientStatistics measured_alike(std::size_t, std::size_t, ConstMemoryView gradient) const {
    return amp::measure_gradient(gradient);
  }

  void check_slot(std::size_t index, std::size_t slot) const;
  void reset(const RoundOptions& options);

  const std::vector<BucketSpec> buckets_;
  std::vector<std::size_t> first_slot_{0};
  std::vector<std::uint8_t> used_;           // by slot, as the caller wrote it
  std::vector<std::uint8_t> used_anywhere_;  // in the finished round
  std::vector<bool> published_;              // in this round
  RoundOptions options_;
  double divisor_ = 1.0;  // of the finished round
  std::shared_ptr<comm::WorkQueue> queue_;
};

// `weight` if it is one. Throws InvalidArgument otherwise.
double checked_weight(double weight);

// The factor that divides by `divisor`; 0 if that is 0.
inline double inverse(double divisor) {
  return divisor > 0.0 ? 1.0 / divisor : 0.0;
}

}  // namespace accelerate_cpp::grad
