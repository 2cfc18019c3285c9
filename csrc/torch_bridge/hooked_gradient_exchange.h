// Gradient buckets that a communication hook of the user's averages (torch.nn.parallel.DistributedDataParallel's
// register_comm_hook): compression, or anything else.
//
// A bucket is handed to the hook when it and all buckets before it are complete, so that all ranks start the
// collectives of their hooks in the same order. What the hook promises replaces the gradients of the bucket, as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/used_slots.h"

namespace accelerate_cpp::grad {

// Starts to average a bucket; what is returned waits for the result.
using CommHook = std::function<std::function<at::Tensor()>(const ::c10d::GradBucket& bucket)>;

class HookedGradientExchange final : public comm::GradientExchange {
 public:
  // `parameters` are those of each bucket, in the order of its slots. The flags of used slots go through
  // `communicator`, which must outlive the exchange.
  HookedGradientExchange(comm::Communicator& communicator, const std::vector<comm::BucketSpec>& buckets,
                         std::vector<std::vector<at::Tensor>> parameters, CommHook hook);

  MemoryView bucket(std::size_t index) override;
  std::uint8_t* used_slots(std::size_t index) override { return used_.own(index); }
  bool used_anywhere(std::size_t index, std::size_t slot) const override { return used_.anywhere(index, slot); }
  // Throws InvalidArgument when a weight is given: what a hook divides by is its own affair.
  void begin(const comm::RoundOptions& options, Deadline deadline) override;
  std::optional<amp::GradientStatistics> statistics(std::size_t, std::size_t) const override { return std::nullopt; }
  double divisor() const override { return communicator_.size(); }
  void publish(std::size_t index) override;
  void progress() override {}
  void finish(Deadline deadline) override;

 private:
  struct Bucket {
    comm::BucketSpec spec;
    std::vector<at::Tensor> parameters;
    at::Tensor memory;
    bool published = false;
    std::function<at::Tensor()> result;  // of the hook, once it has begun
  };

  void start(std::size_t index);

  comm::Communicator& communicator_;
  CommHook hook_;
  std::vector<Bucket> buckets_;
  std::size_t num_started_ = 0;
  comm::UsedSlots used_;
};

}  // namespace accelerate_cpp::grad
