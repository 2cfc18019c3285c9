#include "torch_bridge/hooked_gradient_exchange.h"

#include <string>
#include <utility>

#include "core/base/error.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

HookedGradientExchange::HookedGradientExchange(comm::Communicator& communicator,
                                               const std::vector<comm::BucketSpec>& buckets,
                                               std::vector<std::vector<at::Tensor>> parameters, CommHook hook)
    : communicator_(communicator), hook_(std::move(hook)), used_(buckets) {
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    at::Tensor memory = bucket_memory(buckets[index].count, parameters.at(index).at(0));
    buckets_.push_back({buckets[index], std::move(parameters[index]), std::move(memory)});
  }
}

MemoryView HookedGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = buckets_.at(index);
  return {bucket.memory.data_ptr(), bucket.spec.count, bucket.spec.dtype};
}

void HookedGradientExchange::begin(const comm::RoundOptions& options, Deadline) {
  if (options.weight) {
    throw InvalidArgument(
        "a communication hook averages over all ranks alike, so that weights of gradients and join_uneven_inputs "
        "cannot go with it; leave the hook out");
  }
  num_started_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.published = false;
    bucket.result = nullptr;
  }
}

void HookedGradientExchange::publish(std::size_t index) {
  buckets_.at(index).published = true;
  while (num_started_ < buckets_.size() && buckets_[num_started_].published) {
    start(num_started_++);
  }
}

void HookedGradientExchange::start(std::size_t index) {
  Bucket& bucket = buckets_[index];
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (std::size_t slot = 0; slot < bucket.spec.slots.size(); ++slot) {
    offsets.push_back(bucket.spec.slots[slot].offset);
    lengths.push_back(bucket.spec.slots[slot].count);
    sizes.push_back(bucket.parameters[slot].sizes());
  }
  bucket.result = hook_(::c10d::GradBucket(index, buckets_.size(), bucket.memory, std::move(offsets),
                                           std::move(lengths), std::move(sizes), bucket.parameters, std::nullopt));
}

void HookedGradientExchange::finish(Deadline deadline) {
  for (Bucket& bucket : buckets_) {
    const at::Tensor result = bucket.result();
    if (result.numel() != bucket.memory.numel()) {
      throw InvalidArgument("a communication hook returned " + std::to_string(result.numel()) +
                            " elements for a bucket of " + std::to_string(bucket.memory.numel()) +
                            "; its future must hold one tensor of the size of bucket.buffer()");
    }
    if (!result.is_same(bucket.memory)) {
      bucket.memory.copy_(result.view_as(bucket.memory));
    }
  }
  used_.reduce([&](MemoryView flags) { communicator_.all_reduce(flags, comm::ReduceOp::kMax, deadline); });
  begin({}, deadline);
}

}  // namespace accelerate_cpp::grad
