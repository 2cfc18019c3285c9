#include "core/cuda/driver_api.h"

#include <cerrno>

#include "core/base/error.h"
#include "core/cuda/library.h"

namespace accelerate_cpp::cuda {

DriverApi::DriverApi(const std::string& path_) {
  const Library library("The CUDA driver (libcuda)", nvidia_library_names(path_, "", {"libcuda.so.1"}, {}));
  path = library.path();
  library.bind(init, "cuInit");
  library.bind(device_get, "cuDeviceGet");
  library.bind(device_get_attribute, "cuDeviceGetAttribute");
  library.bind(primary_context_retain, "cuDevicePrimaryCtxRetain");
  library.bind(context_push, "cuCtxPushCurrent_v2");
  library.bind(context_pop, "cuCtxPopCurrent_v2");
  library.bind(module_load_data, "cuModuleLoadData");
  library.bind(module_get_function, "cuModuleGetFunction");
  library.bind(launch_kernel, "cuLaunchKernel");
  library.bind(get_error_string, "cuGetErrorString");
  check(init(0), "cuInit");
}

void DriverApi::check(DriverStatus status, const char* call) const {
  if (status == DriverStatus::kSuccess) {
    return;
  }
  const char* text = nullptr;
  get_error_string(status, &text);
  throw SystemFailure(std::string(call) + " failed with \"" + (text == nullptr ? "no description" : text) +
                          "\" (error " + std::to_string(static_cast<int>(status)) + " of the CUDA driver)",
                      EIO);
}

}  // namespace accelerate_cpp::cuda
