#include "core/grad/solo_gradient_exchange.h"

#include <utility>

#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::grad {

SoloGradientExchange::SoloGradientExchange(std::vector<BucketSpec> buckets) : GradientExchange(std::move(buckets)) {
  for (const BucketSpec& spec : this->buckets()) {
    memory_.push_back(std::make_unique<comm::HeapBuffer>(spec.count * element_size(spec.dtype)));
  }
}

double SoloGradientExchange::complete(MemoryView, Deadline) {
  for (std::size_t index = 0; weight() != 1.0 && index < buckets().size(); ++index) {
    const MemoryView view = bucket(index);
    void* data = view.data;
    comm::reduce(view.dtype, comm::ReduceOp::kAvg, {&data, 1, &data, 1, view.count, inverse(weight())});
  }
  return weight();
}

}  // namespace accelerate_cpp::grad
