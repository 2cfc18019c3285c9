// Gradients, as tensors, multiplied and measured in one pass; see core/amp/gradient_epilogue.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/amp/gradient_epilogue.h"

namespace accelerate_cpp::amp {

// Multiplies floating CPU tensors in place, and returns the statistics of each. Elements are divided among the
// intra-operator threads; the results do not depend on how many there are. Of a sparse gradient the values are
// multiplied; duplicates are summed before it is measured. Throws InvalidArgument for tensors on other devices and for
// other dtypes.
std::vector<GradientStatistics> scale_gradients(const std::vector<at::Tensor>& gradients, double factor);

// The statistics of the tensors as they are.
std::vector<GradientStatistics> measure_gradients(const std::vector<at::Tensor>& gradients);

}  // namespace accelerate_cpp::amp
