// Gradient buckets that a communication hook of the user's averages (torch.nn.parallel.DistributedDataParallel's
// register_comm_hook): compression, or anything else.
//
// A bucket is handed to the hook when it and all buckets before it are complete, so that all ranks start the
// collectives of their hooks in the same order. The hook's result replaces the gradients of the bucket as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/grad/sequential_gradient_exchange.h"

namespace accelerate_cpp::grad {

// Starts to average a bucket; what is returned waits for the result.
using CommHook = std::function<std::function<at::Tensor()>(const ::c10d::GradBucket& bucket)>;

class HookedGradientExchange final : public SequentialGradientExchange {
 public:
  // `parameters` are those of each bucket, in the order of its slots. The flags of used slots go through
  // `communicator`, which must outlive the exchange.
  HookedGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets,
                         std::vector<std::vector<at::Tensor>> parameters, CommHook hook);

 private:
  void* memory(std::size_t index) override { return memory_[index].data_ptr(); }
  // Throws InvalidArgument when a weight is given: a hook decides for itself what to divide by.
  void start_round(Deadline deadline) override;
  void reset_round() override;
  void start(std::size_t index) override;
  double complete(MemoryView used, Deadline deadline) override;

  const CommHook hook_;
  const std::vector<std::vector<at::Tensor>> parameters_;  // by bucket
  std::vector<at::Tensor> memory_;                         // by bucket
  std::vector<std::function<at::Tensor()>> results_;       // of the hook, by bucket, in this round
};

}  // namespace accelerate_cpp::grad
