// Collective operations of a fixed set of ranks.
//
// Every rank calls the same operations in the same order with the same dtypes and counts; anything else raises
// MismatchedCollective on every rank. Calls return when the result is in place. A dead or failed peer raises PeerLost,
// a passed deadline Timeout; after either the communicator stays unusable and says why. One thread at a time calls a
// communicator (calls from several threads are serialised).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/gradient_exchange.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

// Memory from Communicator::allocate; collectives on it need no staging copy. Freed when the last reference is dropped.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // In place: afterwards `data` holds the reduction over all ranks, bitwise equal on all of them.
  virtual void all_reduce(MemoryView data, ReduceOp op, Deadline deadline) = 0;

  // inputs[r] is this rank's contribution to rank r; `output` receives the reduction of the contributions to this rank.
  virtual void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, ReduceOp op,
                              Deadline deadline) = 0;

  // `data` of `root` is copied to all ranks.
  virtual void broadcast(MemoryView data, int root, Deadline deadline) = 0;

  // outputs[r] receives the input of rank r.
  virtual void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, Deadline deadline) = 0;

  // As all_gather, on `root` alone; elsewhere `outputs` is empty.
  virtual void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, Deadline deadline) = 0;

  // inputs[r] of `root` is copied to rank r's `output`; elsewhere `inputs` is empty.
  virtual void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, Deadline deadline) = 0;

  // Returns when every rank has entered it.
  virtual void barrier(Deadline deadline) = 0;

  // Memory on which this communicator works without a staging copy. Not collective. Throws SystemFailure when there is
  // not enough.
  virtual std::shared_ptr<Buffer> allocate(std::size_t size_bytes) = 0;

  // Buckets for gradients, averaged over the ranks. Collective: every rank passes the same buckets.
  virtual std::unique_ptr<GradientExchange> gradient_exchange(const std::vector<BucketSpec>& buckets,
                                                              Deadline deadline) = 0;

  // Makes every rank's current and later operations raise PeerLost with `reason`. Never blocks or throws.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace accelerate_cpp::comm
