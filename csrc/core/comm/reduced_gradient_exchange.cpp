#include "core/comm/reduced_gradient_exchange.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/check.h"

namespace accelerate_cpp::comm {

ReducedGradientExchange::ReducedGradientExchange(Communicator& communicator, const std::vector<BucketSpec>& buckets,
                                                 ReduceOnHost reduce_on_host)
    : communicator_(communicator), reduce_on_host_(std::move(reduce_on_host)) {
  if (!reduce_on_host_) {
    reduce_on_host_ = [this](MemoryView data, ReduceOp op, const Call& call) {
      communicator_.all_reduce(data, op, call);
    };
  }
  std::size_t num_slots = 0;
  for (const BucketSpec& spec : buckets) {
    const std::size_t size_bytes = std::max<std::size_t>(spec.count * element_size(spec.dtype), 1);
    buckets_.push_back({spec, communicator.allocate(size_bytes), num_slots});
    num_slots += spec.slots.size();
  }
  used_.resize(num_slots);
  used_anywhere_.resize(num_slots);
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

std::uint8_t* ReducedGradientExchange::used_slots(std::size_t index) {
  return used_.data() + at(index).first_slot;
}

bool ReducedGradientExchange::used_anywhere(std::size_t index, std::size_t slot) const {
  const Bucket& bucket = at(index);
  ACCELERATE_CHECK(slot < bucket.spec.slots.size(),
                   "slot " + std::to_string(slot) + " of " + std::to_string(bucket.spec.slots.size()));
  return used_anywhere_[bucket.first_slot + slot] != 0;
}

void ReducedGradientExchange::begin(const RoundOptions& options) {
  weight_ = options.weight;
  if (weight_) {
    checked_weight(*weight_);
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
  used_anywhere_ = used_;
  if (!used_anywhere_.empty()) {
    reduce_on_host_({used_anywhere_.data(), used_anywhere_.size(), DType::kUInt8}, ReduceOp::kMax, deadline);
  }
  for (Bucket& bucket : buckets_) {
    bucket.published = false;
  }
  weight_.reset();
}

}  // namespace accelerate_cpp::comm
