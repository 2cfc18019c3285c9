#include "core/comm/nccl/cuda_api.h"

#include <cerrno>

#include "core/base/error.h"
#include "core/cuda/library.h"

namespace accelerate_cpp::comm {

CudaApi::CudaApi(const std::string& path_, const std::string& beside) {
  const cuda::Library library(
      "The CUDA runtime (libcudart)",
      cuda::nvidia_library_names(path_, beside, {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"},
                                 {"nvidia/cu13/lib", "nvidia/cuda_runtime/lib"}));
  path = library.path();
  library.bind(get_device_count, "cudaGetDeviceCount");
  library.bind(get_device, "cudaGetDevice");
  library.bind(set_device, "cudaSetDevice");
  library.bind(device_synchronize, "cudaDeviceSynchronize");
  library.bind(allocate, "cudaMalloc");
  library.bind(release, "cudaFree");
  library.bind(stream_create, "cudaStreamCreateWithFlags");
  library.bind(stream_destroy, "cudaStreamDestroy");
  library.bind(stream_wait_event, "cudaStreamWaitEvent");
  library.bind(event_create, "cudaEventCreateWithFlags");
  library.bind(event_destroy, "cudaEventDestroy");
  library.bind(event_record, "cudaEventRecord");
  library.bind(event_query, "cudaEventQuery");
  library.bind(get_last_error, "cudaGetLastError");
  library.bind(get_error_string, "cudaGetErrorString");
}

void CudaApi::check(CudaStatus status, const char* call) const {
  if (status == CudaStatus::kSuccess) {
    return;
  }
  get_last_error();
  throw SystemFailure(std::string(call) + " failed with \"" + get_error_string(status) + "\" (CUDA error " +
                          std::to_string(static_cast<int>(status)) + ")",
                      status == CudaStatus::kMemoryAllocation ? ENOMEM : EIO);
}

bool CudaApi::done(CudaStatus status, const char* call) const {
  if (status == CudaStatus::kNotReady) {
    get_last_error();
    return false;
  }
  check(status, call);
  return true;
}

}  // namespace accelerate_cpp::comm
