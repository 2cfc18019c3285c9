// Gradient buckets over the all_reduce of any communicator: for ranks that share no memory. With a queue, it reduces
// buckets during the backward pass; without one, nothing moves before finish(). It measures nothing.
#pragma once

#include <memory>
#include <vector>

#include "core/comm/pending.h"
#include "core/grad/sequential_gradient_exchange.h"

namespace accelerate_cpp::grad {

class ReducedGradientExchange final : public SequentialGradientExchange {
 public:
  // `communicator` must outlive the exchange; its allocate() gives the buckets, which lie where its operands do. Ranks
  // that pass different buckets, or give weights where others do not, learn of it in finish(), if the communicator
  // compares calls.
  ReducedGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets);
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

  std::vector<std::shared_ptr<comm::Buffer>> memory_;
  Deadline deadline_ = Deadline::never();                // of this round; for each bucket anew
  std::vector<std::shared_ptr<comm::Pending>> started_;  // in this round; empty without a queue
};

}  // namespace accelerate_cpp::grad
