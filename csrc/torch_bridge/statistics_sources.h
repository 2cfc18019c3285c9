// Who knows what gradients are like without reading them again. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/amp/gradient_epilogue.h"

namespace accelerate_cpp::grad {

// Known from its construction to its end.
class StatisticsSource {
 public:
  StatisticsSource();
  StatisticsSource(const StatisticsSource&) = delete;
  StatisticsSource& operator=(const StatisticsSource&) = delete;

  // What the gradient of a parameter is like, if this source has measured it and nobody can have changed it since. Who
  // asks wants to know in the next passes, too.
  virtual std::optional<amp::GradientStatistics> statistics(const at::Tensor& parameter) = 0;

 protected:
  // To be called first by the destructor of what has statistics().
  void forget_source();
  virtual ~StatisticsSource();
};

// Of each of these parameters, whoever knows it.
std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters);

// So many passes are measured after somebody has asked: loops that clip ask in every step.
inline constexpr int kPassesToMeasure = 8;

}  // namespace accelerate_cpp::grad
