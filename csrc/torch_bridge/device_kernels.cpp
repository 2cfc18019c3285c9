#include "torch_bridge/device_kernels.h"

#include <ATen/Context.h>
#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::grad {

std::string folder_of_torch() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) == 0 || info.dli_fname == nullptr) {
    return "";
  }
  return std::filesystem::path(info.dli_fname).parent_path().parent_path().string();
}

cuda::KernelCompiler kernel_compiler(const std::string& path) {
  return cuda::KernelCompiler(path, folder_of_torch());
}

std::shared_ptr<const cuda::LoadedSlotKernels> slot_kernels_on(const c10::Device& device) {
  static std::mutex mutex;
  // Never destroyed: the driver may be gone before static objects are.
  static auto* const loaded = new std::map<std::string, std::shared_ptr<const cuda::LoadedSlotKernels>>;
  const std::lock_guard lock(mutex);
  if (!device.is_cuda()) {
    throw InvalidArgument("the gradient kernels are for CUDA devices; found " + device.str());
  }
  std::shared_ptr<const cuda::LoadedSlotKernels>& kernels = (*loaded)[device.str()];
  if (!kernels) {
    kernels = std::make_shared<const cuda::LoadedSlotKernels>(std::make_shared<const cuda::DriverApi>(),
                                                              kernel_compiler(), device.index());
  }
  return kernels;
}

}  // namespace accelerate_cpp::grad
