// Buckets of gradients that all ranks fill during a backward pass and that are averaged in place.
//
// One round: every rank writes its buckets and publishes each when it is complete, in any order; finish() returns when
// the average of every bucket is in place on this rank. Between finish() and the next publish() the buckets belong to
// the caller alone. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"

namespace accelerate_cpp::comm {

struct BucketSpec {
  DType dtype;
  std::size_t count;      // elements
  std::size_t num_slots;  // parameters in the bucket, for used_slots
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

  // This rank's part of the bucket is complete and is not touched until finish() returns. Never blocks.
  virtual void publish(std::size_t index) = 0;

  // Works on buckets that all ranks have published. Never blocks.
  virtual void progress() = 0;

  // Waits for every bucket's average. Every bucket must have been published. Errors as in Communicator.
  virtual void finish(Deadline deadline) = 0;
};

}  // namespace accelerate_cpp::comm
