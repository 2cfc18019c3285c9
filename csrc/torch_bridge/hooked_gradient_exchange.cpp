#include "torch_bridge/hooked_gradient_exchange.h"

#include <string>
#include <utility>

#include "core/base/error.h"
#include "torch_bridge/bucket_memory.h"

namespace accelerate_cpp::grad {

HookedGradientExchange::HookedGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets,
                                               std::vector<std::vector<at::Tensor>> parameters, CommHook hook)
    : SequentialGradientExchange(communicator, std::move(buckets)),
      hook_(std::move(hook)),
      parameters_(std::move(parameters)),
      memory_(bucket_memories(this->buckets(), parameters_)) {}

void HookedGradientExchange::start_round(Deadline) {
  if (options().weight) {
    throw InvalidArgument(
        "a communication hook averages over all ranks alike, so that weights of gradients and join_uneven_inputs "
        "cannot go with it; leave the hook out");
  }
  reset_round();
}

void HookedGradientExchange::reset_round() {
  results_.clear();
  SequentialGradientExchange::reset_round();
}

void HookedGradientExchange::start(std::size_t index) {
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  for (std::size_t slot = 0; slot < buckets()[index].slots.size(); ++slot) {
    offsets.push_back(buckets()[index].slots[slot].offset);
    lengths.push_back(buckets()[index].slots[slot].count);
    sizes.push_back(parameters_[index][slot].sizes());
  }
  results_.push_back(hook_(::c10d::GradBucket(index, buckets().size(), memory_[index], std::move(offsets),
                                              std::move(lengths), std::move(sizes), parameters_[index], std::nullopt)));
}

double HookedGradientExchange::complete(MemoryView used, Deadline deadline) {
  for (std::size_t index = 0; index < buckets().size(); ++index) {
    at::Tensor& memory = memory_[index];
    const at::Tensor result = results_[index]();
    if (result.numel() != memory.numel()) {
      throw InvalidArgument("a communication hook returned " + std::to_string(result.numel()) +
                            " elements for a bucket of " + std::to_string(memory.numel()) +
                            "; its future must hold one tensor of the size of bucket.buffer()");
    }
    if (!result.is_same(memory)) {
      memory.copy_(result.view_as(memory));
    }
  }
  reduce_used(used, deadline);
  return sum_of_weights();
}

}  // namespace accelerate_cpp::grad
