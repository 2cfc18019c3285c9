// The entry points of the CUDA driver that load and launch kernels. They are declared here, so that a build needs no
// CUDA toolkit; where its headers are present, driver_declarations_test.cpp compares them with these declarations. All
// of them exist since CUDA 11.
#pragma once

#include <string>

namespace accelerate_cpp::cuda {

enum class DriverStatus : int { kSuccess = 0 };
enum class DeviceAttribute : int { kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };

struct ContextOpaque;
struct ModuleOpaque;
struct FunctionOpaque;
struct StreamOpaque;
using Context = ContextOpaque*;
using Module = ModuleOpaque*;
using Function = FunctionOpaque*;
using Stream = StreamOpaque*;  // null: the default stream

struct DriverApi {
  // Opens `path`, or libcuda.so.1, which comes with the driver of the system. Throws SystemFailure where there is none,
  // or no device.
  explicit DriverApi(const std::string& path = "");

  std::string path;  // the file that was opened

  DriverStatus (*init)(unsigned flags);
  DriverStatus (*device_get)(int* device, int ordinal);
  DriverStatus (*device_get_attribute)(int* value, DeviceAttribute attribute, int device);
  DriverStatus (*primary_context_retain)(Context* context, int device);
  DriverStatus (*context_push)(Context context);
  DriverStatus (*context_pop)(Context* context);
  DriverStatus (*module_load_data)(Module* module, const void* image);
  DriverStatus (*module_get_function)(Function* function, Module module, const char* name);
  DriverStatus (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream,
                                void** parameters, void** extra);
  DriverStatus (*get_error_string)(DriverStatus status, const char** text);

  // Throws SystemFailure unless `status` is success. `call` names the entry point.
  void check(DriverStatus status, const char* call) const;
};

}  // namespace accelerate_cpp::cuda
