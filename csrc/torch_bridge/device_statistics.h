// Statistics of the slots of gradient buckets, measured on their device. The host starts the work on the device's
// current stream and never waits.
//
// The kernels of core/cuda average and measure in one pass over a bucket, and sum in double. Without them ATen takes
// the norms, as torch.nn.utils.clip_grad_norm_ does: on accelerators it sums in the precision of the elements'
// arithmetic (float32 for halves). A sum that is not finite then counts as one such element, whether there are more or
// the sum is just too large: either calls for a smaller loss scale.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/cuda/loaded_slot_kernels.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

// The statistics of one slot: a row of a table on its device, which the host has not read. The row has the sum of the
// squares of the elements and the number of those that are not finite (by ATen, 1 for any number).
struct DeviceRow {
  at::Tensor table;
  std::int64_t row = 0;

  at::Tensor tensor() const { return table.select(0, row); }
};

class DeviceStatistics {
 public:
  // `memory` is that of each bucket, for the life of this object. `kernels` are loaded on its device; null for none.
  DeviceStatistics(const std::vector<BucketSpec>& buckets, const std::vector<at::Tensor>& memory,
                   std::shared_ptr<const cuda::LoadedSlotKernels> kernels);

  // Whether measure() multiplies and measures in one pass.
  bool in_one_pass() const { return kernels_ != nullptr; }

  // Rows that were handed out stay valid.
  void begin_round();

  // Multiplies the slots of a bucket by `factor`, and measures the products.
  void measure(std::size_t bucket, double factor);

  // What the row would be for `gradient`, whose memory has the elements of the slot; summed in the same order.
  DeviceRow measure_alike(std::size_t bucket, std::size_t slot, const at::Tensor& gradient) const;

  // None when the bucket has not been measured in this round.
  std::optional<DeviceRow> row(std::size_t bucket, std::size_t slot) const;

 private:
  struct Bucket {
    DType dtype;
    at::Tensor memory;
    std::vector<SlotSpan> slots;
    std::int64_t first_row = 0;
    bool measured = false;  // in this round
    // For the kernels, on the device: cuda::Chunk as bytes, and 32-bit integers.
    at::Tensor chunks;
    at::Tensor first_chunks;
    std::int64_t num_chunks = 0;
  };

  void put_chunks_on_device(Bucket& bucket) const;
  void run_kernels(const Bucket& bucket, const at::Tensor& rows, double factor) const;

  std::shared_ptr<const cuda::LoadedSlotKernels> kernels_;
  std::vector<Bucket> buckets_;
  at::TensorOptions table_options_;
  std::int64_t num_rows_ = 0;
  at::Tensor table_;  // of this round, once something is measured
};

}  // namespace accelerate_cpp::grad
