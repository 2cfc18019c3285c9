#include "core/grad/sequential_gradient_exchange.h"

#include <utility>

namespace accelerate_cpp::grad {

SequentialGradientExchange::SequentialGradientExchange(comm::Communicator& communicator,
                                                       std::vector<BucketSpec> buckets)
    : GradientExchange(std::move(buckets)), communicator_(communicator), sum_of_weights_(communicator.size()) {}

void SequentialGradientExchange::reset_round() {
  num_started_ = 0;
  sum_of_weights_ = communicator_.size();
}

void SequentialGradientExchange::start_round(Deadline deadline) {
  reset_round();
  if (options().weight) {
    wait_for_turn();
    sum_of_weights_ = weight();
    communicator_.all_reduce_on_host({&sum_of_weights_, 1, DType::kFloat64}, comm::ReduceOp::kSum, deadline);
  }
}

void SequentialGradientExchange::hand_over(std::size_t) {
  while (num_started_ < buckets().size() && is_published(num_started_)) {
    start(num_started_++);
  }
}

void SequentialGradientExchange::reduce_used(MemoryView used, Deadline deadline) const {
  if (used.count > 0) {
    communicator_.all_reduce_on_host(used, comm::ReduceOp::kMax, deadline);
  }
}

}  // namespace accelerate_cpp::grad
