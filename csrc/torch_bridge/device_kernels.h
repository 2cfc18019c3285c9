// The kernels of core/cuda for the device that tensors of torch are on.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "core/cuda/loaded_slot_kernels.h"

namespace accelerate_cpp::grad {

// Compiled and loaded once per device and process. Throws SystemFailure where that is not possible, and InvalidArgument
// when the device is not CUDA's. Thread-safe.
std::shared_ptr<const cuda::LoadedSlotKernels> slot_kernels_on(const c10::Device& device);

// The compiler that torch's CUDA wheels bring along, wherever torch is installed; or the one at `path`. Throws
// SystemFailure.
cuda::KernelCompiler kernel_compiler(const std::string& path = "");

}  // namespace accelerate_cpp::grad
