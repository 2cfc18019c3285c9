#include "torch_bridge/device_statistics.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "torch_bridge/torch_versions.h"

namespace accelerate_cpp::grad {
namespace {

// Some accelerators have no double precision.
at::ScalarType dtype_of_tables(const at::Device& device) {
  return device.is_cpu() || device.is_cuda() ? at::kDouble : at::kFloat;
}

// A copy, on the device, of what the host has at hand.
template <class T>
at::Tensor bytes_on(const at::Device& device, std::vector<T>& values) {
  const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
  return at::from_blob(values.data(), {size}, at::kByte).to(device, at::kByte, /*non_blocking=*/false, /*copy=*/true);
}

cuda::Stream current_stream(const at::Device& device) {
  if (device.is_cpu()) {
    return nullptr;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<cuda::Stream>(comm::native_handle(guard.getStream(device)));
}

void measure_by_aten(const at::Tensor& bucket, const std::vector<SlotSpan>& slots, const at::Tensor& rows) {
  std::vector<at::Tensor> parts;
  parts.reserve(slots.size());
  for (const SlotSpan& slot : slots) {
    parts.push_back(bucket.narrow(0, static_cast<std::int64_t>(slot.offset), static_cast<std::int64_t>(slot.count)));
  }
  const at::Tensor squares = at::stack(at::_foreach_norm(parts, 2, rows.scalar_type())).square_();
  rows.select(1, 0).copy_(squares);
  rows.select(1, 1).copy_(at::isfinite(squares).logical_not_());
}

}  // namespace

DeviceStatistics::DeviceStatistics(const std::vector<BucketSpec>& buckets, const std::vector<at::Tensor>& memory,
                                   std::shared_ptr<const cuda::LoadedSlotKernels> kernels)
    : kernels_(std::move(kernels)) {
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    buckets_.push_back({buckets[index].dtype, memory.at(index), buckets[index].slots, num_rows_});
    num_rows_ += static_cast<std::int64_t>(buckets[index].slots.size());
    if (kernels_) {
      put_chunks_on_device(buckets_.back());
    }
  }
  if (!memory.empty()) {
    const at::Device device = memory.front().device();
    table_options_ = at::TensorOptions().device(device).dtype(dtype_of_tables(device));
  }
}

void DeviceStatistics::put_chunks_on_device(Bucket& bucket) const {
  std::vector<cuda::Chunk> chunks;
  std::vector<std::uint32_t> first_chunks;
  for (const SlotSpan& slot : bucket.slots) {
    first_chunks.push_back(static_cast<std::uint32_t>(chunks.size()));
    for (std::size_t begin = 0; begin < slot.count; begin += cuda::kChunkElements) {
      const std::size_t count = std::min<std::size_t>(cuda::kChunkElements, slot.count - begin);
      chunks.push_back({slot.offset + begin, static_cast<std::uint32_t>(count), 0});
    }
  }
  first_chunks.push_back(static_cast<std::uint32_t>(chunks.size()));
  bucket.num_chunks = static_cast<std::int64_t>(chunks.size());
  bucket.chunks = bytes_on(bucket.memory.device(), chunks);
  bucket.first_chunks = bytes_on(bucket.memory.device(), first_chunks);
}

void DeviceStatistics::begin_round() {
  table_.reset();
  for (Bucket& bucket : buckets_) {
    bucket.measured = false;
  }
}

void DeviceStatistics::measure(std::size_t index, double factor) {
  Bucket& bucket = buckets_.at(index);
  if (!table_.defined()) {
    table_ = at::zeros({num_rows_, 2}, table_options_);
  }
  bucket.measured = true;
  if (bucket.slots.empty()) {
    return;
  }
  const at::Tensor rows = table_.narrow(0, bucket.first_row, static_cast<std::int64_t>(bucket.slots.size()));
  if (kernels_) {
    run_kernels(bucket, rows, factor);
    return;
  }
  if (factor != 1.0) {
    bucket.memory.mul_(factor);
  }
  measure_by_aten(bucket.memory, bucket.slots, rows);
}

void DeviceStatistics::run_kernels(const Bucket& bucket, const at::Tensor& rows, double factor) const {
  // Freed before the device uses it, which is fine for memory of the current stream.
  const at::Tensor partials = at::empty({bucket.num_chunks * static_cast<std::int64_t>(sizeof(cuda::Partial))},
                                        bucket.memory.options().dtype(at::kByte));
  cuda::SlotPass pass{};
  pass.dtype = bucket.dtype;
  pass.bucket = bucket.memory.data_ptr();
  pass.chunks = static_cast<const cuda::Chunk*>(bucket.chunks.const_data_ptr());
  pass.num_chunks = static_cast<unsigned>(bucket.num_chunks);
  pass.first_chunks = static_cast<const unsigned*>(bucket.first_chunks.const_data_ptr());
  pass.num_slots = static_cast<unsigned>(bucket.slots.size());
  pass.partials = static_cast<cuda::Partial*>(partials.data_ptr());
  pass.rows = rows.data_ptr<double>();
  pass.factor = factor == 1.0 ? std::nullopt : std::optional(factor);
  kernels_->run(pass, current_stream(bucket.memory.device()));
}

DeviceRow DeviceStatistics::measure_alike(std::size_t index, std::size_t slot, const at::Tensor& gradient) const {
  const std::size_t count = buckets_.at(index).slots.at(slot).count;
  const at::Tensor real = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
  const at::Tensor memory = real.as_strided({static_cast<std::int64_t>(count)}, {1});
  DeviceStatistics alone({{buckets_[index].dtype, count, {{0, count}}}}, {memory}, kernels_);
  alone.begin_round();
  alone.measure(0, 1.0);
  return *alone.row(0, 0);
}

std::optional<DeviceRow> DeviceStatistics::row(std::size_t index, std::size_t slot) const {
  const Bucket& bucket = buckets_.at(index);
  ACCELERATE_CHECK(slot < bucket.slots.size(), "slot " + std::to_string(slot) + " of bucket " + std::to_string(index));
  if (!bucket.measured) {
    return std::nullopt;
  }
  return DeviceRow{table_, bucket.first_row + static_cast<std::int64_t>(slot)};
}

}  // namespace accelerate_cpp::grad
