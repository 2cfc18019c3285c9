// Gradient buckets over the all_reduce of any communicator: for those that have no memory in common with their peers.
// Where there is a queue, it reduces buckets while the backward pass goes on; otherwise nothing moves before finish().
// Measures nothing.
#pragma once

#include <memory>
#include <vector>

#include "core/comm/pending.h"
#include "core/comm/sequential_gradient_exchange.h"

namespace accelerate_cpp::comm {

class ReducedGradientExchange final : public SequentialGradientExchange {
 public:
  // `communicator` must outlive the exchange; its allocate() gives the buckets, which lie where its operands do.
  // Without `reduce_on_host` it must be able to reduce memory of the host. Ranks that pass different buckets, or give
  // weights where others do not, find out in finish(), as far as the communicator compares what they call.
  ReducedGradientExchange(Communicator& communicator, std::vector<BucketSpec> buckets,
                          ReduceOnHost reduce_on_host = {});
  ~ReducedGradientExchange() override;

 private:
  void* memory(std::size_t index) override { return memory_[index]->data(); }
  void start_round(Deadline deadline) override;
  void reset_round() override;
  void start(std::size_t index) override;
  double complete(MemoryView used, Deadline deadline) override;
  void reduce(std::size_t index, Deadline deadline);
  // Waits for them: they work on memory of this exchange.
  void forget_started();

  Communicator& communicator_;
  std::vector<std::shared_ptr<Buffer>> memory_;
  Deadline deadline_ = Deadline::never();          // of this round; for each bucket anew
  std::vector<std::shared_ptr<Pending>> started_;  // in this round; empty without a queue
};

}  // namespace accelerate_cpp::comm
