// Buckets that go through collectives one after the other, in the order of their numbers, so that all ranks use the
// same order no matter when gradients arrive. What else ranks have to agree on is reduced in host memory.
#pragma once

#include <vector>

#include "core/comm/communicator.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

class SequentialGradientExchange : public GradientExchange {
 protected:
  // `communicator` must outlive the exchange.
  SequentialGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets);

  comm::Communicator& communicator() const { return communicator_; }

  // Of this round.
  double sum_of_weights() const { return sum_of_weights_; }
  // Replaces flags by their maxima over the ranks.
  void reduce_used(MemoryView used, Deadline deadline) const;

  // With weights, the ranks tell each other theirs.
  void start_round(Deadline deadline) override;
  void reset_round() override;

 private:
  // The bucket and all before it are published. Never blocks.
  virtual void start(std::size_t index) = 0;
  void hand_over(std::size_t index) final;

  comm::Communicator& communicator_;
  std::size_t num_started_ = 0;  // in this round
  double sum_of_weights_;
};

}  // namespace accelerate_cpp::grad
