// Buckets of gradients that all ranks fill during a backward pass and that are averaged in place.
//
// One round: every rank may begin() it, writes its buckets and publishes each when it is complete, in any order;
// finish() returns when the average of every bucket is in place on this rank. Between finish() and the next publish()
// the buckets belong to the caller alone. One thread at a time.
//
// A round that a rank cannot finish is an interruption of its communicator: no rank finishes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/amp/gradient_epilogue.h"
#include "core/base/deadline.h"
#include "core/base/memory_view.h"

namespace accelerate_cpp::comm {

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
  // What the gradients of this rank weigh, at least 0: the sum over the ranks is divided by the sum of their weights.
  // They all give one (or they get a MismatchedCollective) or none does: then the sum is divided by their number.
  std::optional<double> weight;
  bool measures = false;  // statistics() are wanted
};

class GradientExchange {
 public:
  virtual ~GradientExchange() = default;

  // The memory of one bucket, aligned to 64 bytes, stable for the life of the exchange.
  virtual MemoryView bucket(std::size_t index) = 0;

  // One byte per slot, written by the caller before publish(): whether this rank has a gradient for it.
  virtual std::uint8_t* used_slots(std::size_t index) = 0;

  // After finish(): whether any rank had a gradient for the slot in the finished round.
  virtual bool used_anywhere(std::size_t index, std::size_t slot) const = 0;

  // Before the first publish() of a round for which something else than RoundOptions() holds, or that follows one that
  // was not finished. Such a round is forgotten; begin() returns when no rank works on it any more. Throws
  // InvalidArgument when the weight is out of its range.
  virtual void begin(const RoundOptions& options, Deadline deadline) = 0;

  // After finish(), until the next publish(): what the averages of the slot are like, before they were touched; equal
  // on all ranks. None unless every rank asked for them and they came about on the way.
  virtual std::optional<amp::GradientStatistics> statistics(std::size_t index, std::size_t slot) const = 0;

  // After finish(), until the next publish(): what the sums over the ranks were divided by; 0 when all weights were 0,
  // which makes all averages 0.
  virtual double divisor() const = 0;

  // This rank's part of the bucket is complete and is not touched until finish() returns. Never blocks.
  virtual void publish(std::size_t index) = 0;

  // Works on buckets that all ranks have published. Never blocks.
  virtual void progress() = 0;

  // Waits for every bucket's average. Every bucket must have been published. Errors as in Communicator.
  virtual void finish(Deadline deadline) = 0;
};

// `weight` if it is one. Throws InvalidArgument otherwise.
double checked_weight(double weight);

// What divides by `divisor`; by 0 gives 0.
inline double inverse(double divisor) {
  return divisor > 0.0 ? 1.0 / divisor : 0.0;
}

}  // namespace accelerate_cpp::comm
