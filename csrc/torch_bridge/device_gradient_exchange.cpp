#include "torch_bridge/device_gradient_exchange.h"

#include <utility>

#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

DeviceGradientExchange::DeviceGradientExchange(comm::Communicator& communicator,
                                               const std::vector<comm::BucketSpec>& buckets,
                                               const std::vector<std::vector<at::Tensor>>& parameters,
                                               SumOverRanks sum_over_ranks,
                                               std::shared_ptr<const cuda::LoadedSlotKernels> kernels)
    : communicator_(communicator),
      sum_over_ranks_(std::move(sum_over_ranks)),
      buckets_(make_buckets(buckets, parameters)),
      statistics_(buckets, memory_of(buckets_), std::move(kernels)),
      used_(buckets) {
  reset_round();
}

std::vector<DeviceGradientExchange::Bucket> DeviceGradientExchange::make_buckets(
    const std::vector<comm::BucketSpec>& specs, const std::vector<std::vector<at::Tensor>>& parameters) {
  std::vector<Bucket> buckets;
  for (std::size_t index = 0; index < specs.size(); ++index) {
    buckets.push_back({specs[index], bucket_memory(specs[index].count, parameters.at(index).at(0))});
  }
  return buckets;
}

std::vector<at::Tensor> DeviceGradientExchange::memory_of(const std::vector<Bucket>& buckets) {
  std::vector<at::Tensor> memory;
  for (const Bucket& bucket : buckets) {
    memory.push_back(bucket.memory);
  }
  return memory;
}

void DeviceGradientExchange::reset_round() {
  num_started_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.published = false;
    bucket.await = nullptr;
  }
  completing_ = weighted_ = measures_ = false;
  sum_of_weights_ = communicator_.size();
  factor_ = 1.0 / sum_of_weights_;
}

bool DeviceGradientExchange::averages_after_sum(const Bucket& bucket) const {
  return statistics_.in_one_pass() && !weighted_ && bucket.spec.dtype != DType::kFloat16;
}

MemoryView DeviceGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = buckets_.at(index);
  return {bucket.memory.data_ptr(), bucket.spec.count, bucket.spec.dtype};
}

void DeviceGradientExchange::begin(const comm::RoundOptions& options, Deadline deadline) {
  reset_round();
  measures_ = options.measures;
  if (options.weight) {
    weighted_ = true;
    sum_of_weights_ = comm::checked_weight(*options.weight);
    communicator_.all_reduce({&sum_of_weights_, 1, DType::kFloat64}, comm::ReduceOp::kSum, deadline);
    factor_ = *options.weight * comm::inverse(sum_of_weights_);
  }
}

void DeviceGradientExchange::publish(std::size_t index) {
  buckets_.at(index).published = true;
  while (num_started_ < buckets_.size() && buckets_[num_started_].published) {
    Bucket& bucket = buckets_[num_started_++];
    if (!averages_after_sum(bucket)) {
      bucket.memory.mul_(factor_);
    }
    bucket.await = sum_over_ranks_(bucket.memory);
  }
}

void DeviceGradientExchange::finish(Deadline deadline) {
  // First, since a rank that has failed says so here, and would be waited for there.
  used_.reduce([&](MemoryView flags) { communicator_.all_reduce(flags, comm::ReduceOp::kMax, deadline); });
  completing_ = true;
  statistics_.begin_round();
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    buckets_[index].await();
    const bool averages = averages_after_sum(buckets_[index]);
    if (averages || measures_) {
      statistics_.measure(index, averages ? factor_ : 1.0);
    }
  }
  divisor_ = sum_of_weights_;
  reset_round();
}

}  // namespace accelerate_cpp::grad
