// Gradient buckets in the memory of an accelerator, summed by a process group of torch (NCCL), while a communicator of
// the host carries what the ranks have to agree on.
//
// A bucket is handed to the process group when it and all buckets before it are complete, so that all ranks start the
// same collectives in the same order; the host waits for none of them. Ranks meet on the host once, at the end of a
// round. The average is made before the sum; or after it, by the kernels that measure it in the same pass. A rank that
// fails within a round has begun some of its collectives and not others: nobody can go on with the process group then.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/used_slots.h"
#include "torch_bridge/device_statistics.h"

namespace accelerate_cpp::grad {

// Starts to sum a bucket over the ranks, in place; what is returned makes later work wait for the result.
using SumOverRanks = std::function<std::function<void()>(const at::Tensor& bucket)>;

// What the reducer needs of the process group that sums buckets on an accelerator.
struct DeviceGroup {
  SumOverRanks sum_over_ranks;
  std::function<void()> abort;                             // ends what has begun; the group cannot be used any more
  std::shared_ptr<const cuda::LoadedSlotKernels> kernels;  // measure the averages; null: ATen does
};

class DeviceGradientExchange final : public comm::GradientExchange {
 public:
  // `parameters` are those of each bucket, on whose device its memory is. `communicator` has the same ranks as the
  // process group and must outlive the exchange. All of them have `kernels` or none.
  DeviceGradientExchange(comm::Communicator& communicator, const std::vector<comm::BucketSpec>& buckets,
                         const std::vector<std::vector<at::Tensor>>& parameters, SumOverRanks sum_over_ranks,
                         std::shared_ptr<const cuda::LoadedSlotKernels> kernels = nullptr);

  // On the device: an address that the host must not read.
  MemoryView bucket(std::size_t index) override;
  std::uint8_t* used_slots(std::size_t index) override { return used_.own(index); }
  bool used_anywhere(std::size_t index, std::size_t slot) const override { return used_.anywhere(index, slot); }
  // With a weight, the ranks tell each other theirs.
  void begin(const comm::RoundOptions& options, Deadline deadline) override;
  // The host knows none.
  std::optional<amp::GradientStatistics> statistics(std::size_t, std::size_t) const override { return std::nullopt; }
  // As statistics(), on the device. Equal on all ranks as far as the process group's sums are.
  std::optional<DeviceRow> device_statistics(std::size_t index, std::size_t slot) const {
    return statistics_.row(index, slot);
  }
  // Whether the ranks have met in this round, so that others may complete it although this one cannot.
  bool completing() const { return completing_; }
  double divisor() const override { return divisor_; }
  void publish(std::size_t index) override;
  void progress() override {}
  void finish(Deadline deadline) override;

 private:
  struct Bucket {
    comm::BucketSpec spec;
    at::Tensor memory;
    bool published = false;
    std::function<void()> await;  // once its sum has begun
  };

  static std::vector<Bucket> make_buckets(const std::vector<comm::BucketSpec>& specs,
                                          const std::vector<std::vector<at::Tensor>>& parameters);
  static std::vector<at::Tensor> memory_of(const std::vector<Bucket>& buckets);
  // Unless begin() says otherwise, all ranks weigh 1.
  void reset_round();
  // Whether the bucket is multiplied once it is summed: float16 might not hold the sum, and weights are the ranks' own.
  bool averages_after_sum(const Bucket& bucket) const;

  comm::Communicator& communicator_;
  SumOverRanks sum_over_ranks_;
  std::vector<Bucket> buckets_;
  DeviceStatistics statistics_;
  std::size_t num_started_ = 0;
  bool completing_ = false;
  bool weighted_ = false;        // in the current round
  bool measures_ = false;        // in the current round
  double factor_ = 0.0;          // of this rank's gradients in the current round
  double sum_of_weights_ = 0.0;  // in the current round
  double divisor_ = 0.0;         // of the finished round
  comm::UsedSlots used_;
};

}  // namespace accelerate_cpp::grad
