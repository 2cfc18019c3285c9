// The reducers that there are in this process. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "torch_bridge/gradient_reducer.h"

namespace accelerate_cpp::grad {

// The others leave to it the parameters that it has in common with them.
void add_reducer(const std::shared_ptr<GradientReducer>& reducer);

// GradientReducer::statistics() for each of these parameters, of whichever reducer has it.
std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters);

}  // namespace accelerate_cpp::grad
