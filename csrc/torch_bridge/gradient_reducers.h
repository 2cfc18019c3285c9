// All reducers of this process. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torch_bridge/gradient_reducer.h"

namespace accelerate_cpp::grad {

// The others give up the parameters that they share with it.
void add_reducer(GradientReducer& reducer);
void remove_reducer(GradientReducer& reducer);

// Call the first when a module gets a parameter or a submodule; the second returns how often that was.
void note_registration() noexcept;
std::uint64_t registrations() noexcept;

// GradientReducer::statistics() for each of these parameters, of whichever reducer has it, where they are numbers.
std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters);

// The same where their device has them: two elements each, as DeviceRow has them.
std::vector<std::optional<at::Tensor>> known_device_statistics(const std::vector<at::Tensor>& parameters);

}  // namespace accelerate_cpp::grad
