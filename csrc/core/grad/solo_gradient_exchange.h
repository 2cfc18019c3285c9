// Buckets of a group of one rank: the average is the gradient, divided by its weight.
#pragma once

#include <memory>
#include <vector>

#include "core/comm/heap_buffer.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

class SoloGradientExchange final : public GradientExchange {
 public:
  explicit SoloGradientExchange(std::vector<BucketSpec> buckets);

 private:
  void* memory(std::size_t index) override { return memory_[index]->data(); }
  void hand_over(std::size_t) override {}
  double complete(MemoryView used, Deadline deadline) override;

  std::vector<std::unique_ptr<comm::HeapBuffer>> memory_;
};

}  // namespace accelerate_cpp::grad
