// What the .grad of a parameter is while it lies in a slot; and its statistics, for as long as nobody can have changed
// it since they were taken.
//
// In-place operations show in the version of a tensor. What Python can do besides (p.grad.data.mul_(), NumPy, DLPack)
// does not; but Python has to take hold of the tensor first, and that shows, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <variant>

#include "core/amp/gradient_epilogue.h"
#include "torch_bridge/device_statistics.h"

namespace accelerate_cpp::grad {

// What a gradient is like: numbers, or what its device knows.
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

  // If they were given, and are true still.
  std::optional<Measurement> statistics() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
  std::optional<Measurement> statistics_;
};

}  // namespace accelerate_cpp::grad
