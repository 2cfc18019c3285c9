// What reducers refuse within a backward pass. All of these throw InvalidArgument.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/base/background.h"

namespace accelerate_cpp::grad {

// In a forked child, gradients lie in memory of the process that prepared the model.
void check_not_forked(const OwnerProcess& process);

// The gradient of `parameter` has a graph.
void check_no_graph(const at::Tensor& gradient);

// `parameter` has received a gradient after its first one had been handed on.
[[noreturn]] void throw_second_gradient(const std::string& parameter);

// A gradient has arrived from another pass than the one in progress.
[[noreturn]] void throw_other_pass();

}  // namespace accelerate_cpp::grad
