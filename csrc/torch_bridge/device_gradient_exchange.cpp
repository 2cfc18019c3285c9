#include "torch_bridge/device_gradient_exchange.h"

#include <utility>

namespace accelerate_cpp::grad {

DeviceGradientExchange::DeviceGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets,
                                               const std::vector<std::vector<at::Tensor>>& parameters,
                                               const DeviceGroup& group)
    : SequentialGradientExchange(communicator, std::move(buckets)),
      sum_over_ranks_(group.sum_over_ranks),
      memory_(bucket_memories(this->buckets(), parameters, group.allocate)),
      statistics_(this->buckets(), memory_, group.kernels) {}

void DeviceGradientExchange::reset_round() {
  awaits_.clear();
  completing_ = false;
  SequentialGradientExchange::reset_round();
}

bool DeviceGradientExchange::averages_after_sum(std::size_t index) const {
  return statistics_.in_one_pass() && !options().weight && buckets()[index].dtype != DType::kFloat16;
}

void DeviceGradientExchange::start(std::size_t index) {
  if (!averages_after_sum(index)) {
    memory_[index].mul_(inverse(sum_of_weights()));
  }
  awaits_.push_back(sum_over_ranks_(memory_[index]));
}

double DeviceGradientExchange::complete(MemoryView used, Deadline deadline) {
  // First, because a failed rank is noticed here, but would be waited for there.
  reduce_used(used, deadline);
  completing_ = true;
  statistics_.begin_round();
  for (std::size_t index = 0; index < buckets().size(); ++index) {
    awaits_[index]();
    const bool averages = averages_after_sum(index);
    if (averages || options().measures) {
      statistics_.measure(index, averages ? inverse(sum_of_weights()) : 1.0);
    }
  }
  return sum_of_weights();
}

}  // namespace accelerate_cpp::grad
