// The .grad of a parameter while it lies in a slot, and its statistics, which hold as long as nothing can have changed
// it.
//
// In-place operations show in the version of a tensor. Other changes from Python (p.grad.data.mul_(), NumPy, DLPack) do
// not, but Python must take a reference to the tensor first, which shows too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <variant>

#include "core/amp/gradient_epilogue.h"
#include "torch_bridge/device_statistics.h"

namespace accelerate_cpp::grad {

// Statistics of a gradient: as numbers, or as a row on its device.
using Measurement = std::variant<amp::GradientStatistics, DeviceRow>;

class BoundGradient {
 public:
  BoundGradient() = default;  // of no slot

  // `slot` is a tensor that nobody else ever holds.
  explicit BoundGradient(const at::Tensor& slot, std::optional<Measurement> statistics = {});

  // Shares memory and version with the slot. No program has seen it when it is made.
  const at::Tensor& tensor() const { return tensor_; }

  bool is(const at::Tensor& gradient) const { return gradient.defined() && gradient.is_same(tensor_); }

  bool has_measurement() const { return statistics_.has_value(); }

  // The statistics, if there are any and they still hold.
  std::optional<Measurement> statistics() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
  std::optional<Measurement> statistics_;
};

}  // namespace accelerate_cpp::grad
