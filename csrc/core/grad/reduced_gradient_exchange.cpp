#include "core/grad/reduced_gradient_exchange.h"

#include <algorithm>
#include <utility>

namespace accelerate_cpp::grad {

ReducedGradientExchange::ReducedGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets)
    : SequentialGradientExchange(communicator, std::move(buckets)) {
  for (const BucketSpec& spec : this->buckets()) {
    memory_.push_back(communicator.allocate(std::max<std::size_t>(spec.count * element_size(spec.dtype), 1)));
  }
}

ReducedGradientExchange::~ReducedGradientExchange() {
  try {
    forget_started();
  } catch (...) {
    // The queue has been stopped and runs nothing any more, or the user interrupts a round that will never finish.
  }
}

void ReducedGradientExchange::forget_started() {
  if (!started_.empty()) {
    wait_for_turn();
    started_.clear();
  }
}

void ReducedGradientExchange::start_round(Deadline deadline) {
  forget_started();
  deadline_ = deadline;
  SequentialGradientExchange::start_round(deadline);
}

void ReducedGradientExchange::reset_round() {
  started_.clear();
  SequentialGradientExchange::reset_round();
}

void ReducedGradientExchange::start(std::size_t index) {
  if (queue() != nullptr) {
    started_.push_back(queue()->issue([this, index] { reduce(index, deadline_.renewed()); }));
  }
}

void ReducedGradientExchange::reduce(std::size_t index, Deadline deadline) {
  const comm::Reduction average =
      options().weight ? comm::Reduction(comm::ReduceOp::kPreMulSum, inverse(sum_of_weights())) : comm::ReduceOp::kAvg;
  communicator().all_reduce(bucket(index), average, deadline);
}

double ReducedGradientExchange::complete(MemoryView used, Deadline deadline) {
  if (queue() != nullptr) {
    for (const std::shared_ptr<comm::Pending>& one : started_) {
      one->wait(deadline);
    }
  } else {
    for (std::size_t index = 0; index < buckets().size(); ++index) {
      reduce(index, deadline);
    }
  }
  reduce_used(used, deadline);
  return sum_of_weights();
}

}  // namespace accelerate_cpp::grad
