// Buckets that go through collectives one after the other, in the order of their numbers, which is the same on all
// ranks whatever the order in which their gradients arrive. What ranks have to agree on besides is reduced in the
// memory of the host.
#pragma once

#include <functional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

class SequentialGradientExchange : public GradientExchange {
 public:
  // Reduces memory of the host over the ranks.
  using ReduceOnHost = std::function<void(MemoryView data, comm::ReduceOp op, const comm::Call& call)>;

 protected:
  SequentialGradientExchange(std::vector<BucketSpec> buckets, int num_ranks, ReduceOnHost reduce_on_host);

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

  const int num_ranks_;
  const ReduceOnHost reduce_on_host_;
  std::size_t num_started_ = 0;  // in this round
  double sum_of_weights_;
};

// Reduces by `communicator`, which must outlive what is returned.
SequentialGradientExchange::ReduceOnHost reduce_by(comm::Communicator& communicator);

}  // namespace accelerate_cpp::grad
