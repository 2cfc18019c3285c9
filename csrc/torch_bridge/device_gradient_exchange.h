// Gradient buckets in the memory of an accelerator, summed by a process group of torch or by an NcclComm, while a
// communicator of the host carries what the ranks have to agree on.
//
// A bucket is handed to the device group, which sums it, when it and all buckets before it are complete, so that all
// ranks start the same collectives in the same order; the host waits for none of them. Ranks meet on the host once, at
// the end of a round. Gradients are divided before the sum; or after it, by the kernels that measure it in the same
// pass. A rank that fails within a round has begun some of its collectives and not others: nobody can go on with the
// device group then.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/grad/sequential_gradient_exchange.h"
#include "torch_bridge/bucket_memory.h"
#include "torch_bridge/device_statistics.h"

namespace accelerate_cpp::grad {

// Starts to sum a bucket over the ranks, in place, behind what is on the current stream; what is returned makes the
// stream that is current then wait for the result. Neither waits for other ranks.
using SumOverRanks = std::function<std::function<void()>(const at::Tensor& bucket)>;

// What sums buckets on an accelerator: a process group of torch, or nccl_device_group().
struct DeviceGroup {
  SumOverRanks sum_over_ranks;
  std::function<void()> abort;                             // ends what has begun; the group cannot be used any more
  std::shared_ptr<const cuda::LoadedSlotKernels> kernels;  // measure the averages; null: ATen does
  BucketAllocator allocate = torch_bucket;                 // memory that the group sums well
};

class DeviceGradientExchange final : public SequentialGradientExchange {
 public:
  // `parameters` are those of each bucket, on whose device its memory is. `communicator` has the same ranks as the
  // device group and must outlive the exchange. All of them have kernels or none.
  DeviceGradientExchange(comm::Communicator& communicator, std::vector<BucketSpec> buckets,
                         const std::vector<std::vector<at::Tensor>>& parameters, const DeviceGroup& group);

  // As statistics(), of which the host knows none, on the device. Equal on all ranks as far as the device group's sums
  // are.
  std::optional<DeviceRow> device_statistics(std::size_t index, std::size_t slot) const {
    return statistics_.row(index, slot);
  }
  // As measure(), on the device.
  DeviceRow measure(std::size_t index, std::size_t slot, const at::Tensor& gradient) const {
    return statistics_.measure_alike(index, slot, gradient);
  }
  // Whether the ranks have met in this round, so that others may complete it although this one cannot.
  bool completing() const { return completing_; }

 private:
  // An address that the host must not read.
  void* memory(std::size_t index) override { return memory_[index].data_ptr(); }
  void reset_round() override;
  void start(std::size_t index) override;
  double complete(MemoryView used, Deadline deadline) override;
  // Whether the bucket is divided once it is summed: float16 might not hold the sum, and of weights a rank knows its
  // own alone.
  bool averages_after_sum(std::size_t index) const;

  SumOverRanks sum_over_ranks_;
  std::vector<at::Tensor> memory_;             // by bucket
  std::vector<std::function<void()>> awaits_;  // by bucket, in this round
  DeviceStatistics statistics_;
  bool completing_ = false;
};

}  // namespace accelerate_cpp::grad
