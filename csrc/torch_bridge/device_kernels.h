// The kernels of core/cuda for the device that tensors of torch are on.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "core/cuda/loaded_slot_kernels.h"

namespace accelerate_cpp::grad {

// The folder of the torch that is loaded, beside which pip puts NVIDIA's packages.
std::string folder_of_torch();

// Compiled and loaded once per device and process. Throws SystemFailure where that is not possible, and InvalidArgument
// when the device is not CUDA's. Thread-safe.
std::shared_ptr<const cuda::LoadedSlotKernels> slot_kernels_on(const c10::Device& device);

// The compiler that torch's CUDA wheels bring along, wherever torch is installed; or the one at `path`. Throws
// SystemFailure.
cuda::KernelCompiler kernel_compiler(const std::string& path = "");

}  // namespace accelerate_cpp::grad
