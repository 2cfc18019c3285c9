// Compiled where the headers of the CUDA toolkit are: our declarations against theirs. A difference does not compile.
#include <cuda.h>

#include "core/comm/nccl/same_declaration.h"
#include "core/cuda/driver_api.h"

namespace accelerate_cpp::cuda {
namespace {

#define ACCELERATE_SAME(ours, theirs)                                                            \
  static_assert(comm::testing::kSameDeclaration<decltype(DriverApi::ours), decltype(&::theirs)>, \
                "DriverApi::" #ours " is declared unlike " #theirs)

// Some of these names stand for those with _v2, which are bound.
ACCELERATE_SAME(init, cuInit);
ACCELERATE_SAME(device_get, cuDeviceGet);
ACCELERATE_SAME(device_get_attribute, cuDeviceGetAttribute);
ACCELERATE_SAME(primary_context_retain, cuDevicePrimaryCtxRetain);
ACCELERATE_SAME(context_push, cuCtxPushCurrent);
ACCELERATE_SAME(context_pop, cuCtxPopCurrent);
ACCELERATE_SAME(module_load_data, cuModuleLoadData);
ACCELERATE_SAME(module_get_function, cuModuleGetFunction);
ACCELERATE_SAME(launch_kernel, cuLaunchKernel);
ACCELERATE_SAME(get_error_string, cuGetErrorString);

static_assert(static_cast<int>(DriverStatus::kSuccess) == CUDA_SUCCESS);
static_assert(static_cast<int>(DeviceAttribute::kComputeCapabilityMajor) ==
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(static_cast<int>(DeviceAttribute::kComputeCapabilityMinor) ==
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);

}  // namespace
}  // namespace accelerate_cpp::cuda
