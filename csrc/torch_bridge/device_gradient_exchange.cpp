#include "torch_bridge/device_gradient_exchange.h"

#include <utility>

#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

DeviceGradientExchange::DeviceGradientExchange(comm::Communicator& communicator,
                                               const std::vector<comm::BucketSpec>& buckets,
                                               const std::vector<std::vector<at::Tensor>>& parameters,
                                               SumOverRanks sum_over_ranks)
    : communicator_(communicator), sum_over_ranks_(std::move(sum_over_ranks)), used_(buckets) {
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    buckets_.push_back({buckets[index], bucket_memory(buckets[index].count, parameters.at(index).at(0))});
  }
  reset_round();
}

void DeviceGradientExchange::reset_round() {
  num_started_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.published = false;
    bucket.await = nullptr;
  }
  sum_of_weights_ = communicator_.size();
  factor_ = 1.0 / sum_of_weights_;
}

MemoryView DeviceGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = buckets_.at(index);
  return {bucket.memory.data_ptr(), bucket.spec.count, bucket.spec.dtype};
}

void DeviceGradientExchange::begin(const comm::RoundOptions& options, Deadline deadline) {
  reset_round();
  if (options.weight) {
    sum_of_weights_ = comm::checked_weight(*options.weight);
    communicator_.all_reduce({&sum_of_weights_, 1, DType::kFloat64}, comm::ReduceOp::kSum, deadline);
    factor_ = *options.weight * comm::inverse(sum_of_weights_);
  }
}

void DeviceGradientExchange::publish(std::size_t index) {
  buckets_.at(index).published = true;
  while (num_started_ < buckets_.size() && buckets_[num_started_].published) {
    Bucket& bucket = buckets_[num_started_++];
    // Before the sum, which half precision might not hold.
    bucket.memory.mul_(factor_);
    bucket.await = sum_over_ranks_(bucket.memory);
  }
}

void DeviceGradientExchange::finish(Deadline deadline) {
  // First, since a rank that has failed says so here, and would be waited for there.
  used_.reduce([&](MemoryView flags) { communicator_.all_reduce(flags, comm::ReduceOp::kMax, deadline); });
  for (const Bucket& bucket : buckets_) {
    bucket.await();
  }
  divisor_ = sum_of_weights_;
  reset_round();
}

}  // namespace accelerate_cpp::grad
