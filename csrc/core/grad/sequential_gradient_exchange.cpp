#include "core/grad/sequential_gradient_exchange.h"

#include <utility>

namespace accelerate_cpp::grad {

SequentialGradientExchange::SequentialGradientExchange(std::vector<BucketSpec> buckets, int num_ranks,
                                                       ReduceOnHost reduce_on_host)
    : GradientExchange(std::move(buckets)),
      num_ranks_(num_ranks),
      reduce_on_host_(std::move(reduce_on_host)),
      sum_of_weights_(num_ranks) {}

void SequentialGradientExchange::reset_round() {
  num_started_ = 0;
  sum_of_weights_ = num_ranks_;
}

void SequentialGradientExchange::start_round(Deadline deadline) {
  reset_round();
  if (options().weight) {
    wait_for_turn();
    sum_of_weights_ = weight();
    reduce_on_host_({&sum_of_weights_, 1, DType::kFloat64}, comm::ReduceOp::kSum, deadline);
  }
}

void SequentialGradientExchange::hand_over(std::size_t) {
  while (num_started_ < buckets().size() && is_published(num_started_)) {
    start(num_started_++);
  }
}

void SequentialGradientExchange::reduce_used(MemoryView used, Deadline deadline) const {
  if (used.count > 0) {
    reduce_on_host_(used, comm::ReduceOp::kMax, deadline);
  }
}

SequentialGradientExchange::ReduceOnHost reduce_by(comm::Communicator& communicator) {
  return [&communicator](MemoryView data, comm::ReduceOp op, const comm::Call& call) {
    communicator.all_reduce_on_host(data, op, call);
  };
}

}  // namespace accelerate_cpp::grad
