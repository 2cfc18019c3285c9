#include "core/comm/reduced_gradient_exchange.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/check.h"

namespace accelerate_cpp::comm {

ReducedGradientExchange::ReducedGradientExchange(Communicator& communicator, const std::vector<BucketSpec>& buckets,
                                                 ReduceOnHost reduce_on_host)
    : communicator_(communicator), reduce_on_host_(std::move(reduce_on_host)), used_(buckets) {
  if (!reduce_on_host_) {
    reduce_on_host_ = [this](MemoryView data, ReduceOp op, const Call& call) {
      communicator_.all_reduce(data, op, call);
    };
  }
  for (const BucketSpec& spec : buckets) {
    const std::size_t size_bytes = std::max<std::size_t>(spec.count * element_size(spec.dtype), 1);
    buckets_.push_back({spec, communicator.allocate(size_bytes)});
  }
}

const ReducedGradientExchange::Bucket& ReducedGradientExchange::at(std::size_t index) const {
  ACCELERATE_CHECK(index < buckets_.size(),
                   "bucket " + std::to_string(index) + " of " + std::to_string(buckets_.size()));
  return buckets_[index];
}

MemoryView ReducedGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = at(index);
  return {bucket.memory->data(), bucket.spec.count, bucket.spec.dtype};
}

void ReducedGradientExchange::begin(const RoundOptions& options, Deadline) {
  weight_ = options.weight ? std::optional(checked_weight(*options.weight)) : std::nullopt;
  for (Bucket& bucket : buckets_) {
    bucket.published = false;
  }
}

void ReducedGradientExchange::publish(std::size_t index) {
  ACCELERATE_CHECK(!at(index).published, "bucket " + std::to_string(index) + " is published once per round");
  buckets_[index].published = true;
}

void ReducedGradientExchange::finish(Deadline deadline) {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    ACCELERATE_CHECK(buckets_[index].published, "bucket " + std::to_string(index) + " is published before finish()");
  }
  Reduction reduction = ReduceOp::kAvg;
  divisor_ = communicator_.size();
  if (weight_) {
    divisor_ = *weight_;
    reduce_on_host_({&divisor_, 1, DType::kFloat64}, ReduceOp::kSum, deadline);
    reduction = {ReduceOp::kPreMulSum, inverse(divisor_)};
  }
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    communicator_.all_reduce(bucket(index), reduction, deadline);
  }
  used_.reduce([&](MemoryView flags) { reduce_on_host_(flags, ReduceOp::kMax, deadline); });
  begin({}, deadline);
}

}  // namespace accelerate_cpp::comm
