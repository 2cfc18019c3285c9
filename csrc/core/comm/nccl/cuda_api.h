// The entry points of the CUDA runtime that NcclComm uses. They are declared here, so that a build needs no CUDA
// toolkit; where its headers are present, cuda_declarations_test.cpp compares. All of them exist unchanged since
// CUDA 11.
#pragma once

#include <cstddef>
#include <string>

namespace accelerate_cpp::comm {

enum class CudaStatus : int { kSuccess = 0, kMemoryAllocation = 2, kNotReady = 600 };

struct CudaStreamOpaque;
struct CudaEventOpaque;
using CudaStream = CudaStreamOpaque*;  // null: the default stream
using CudaEvent = CudaEventOpaque*;

inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;

struct CudaApi {
  // Opens `path`, or libcudart where nvidia_library_names() finds it. Throws SystemFailure.
  explicit CudaApi(const std::string& path = "", const std::string& beside = "");

  std::string path;  // the file that was opened

  CudaStatus (*get_device_count)(int* count);
  CudaStatus (*get_device)(int* device);
  CudaStatus (*set_device)(int device);
  CudaStatus (*device_synchronize)();
  CudaStatus (*allocate)(void** memory, std::size_t size_bytes);
  CudaStatus (*release)(void* memory);
  CudaStatus (*stream_create)(CudaStream* stream, unsigned flags);
  CudaStatus (*stream_destroy)(CudaStream stream);
  CudaStatus (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaStatus (*event_create)(CudaEvent* event, unsigned flags);
  CudaStatus (*event_destroy)(CudaEvent event);
  CudaStatus (*event_record)(CudaEvent event, CudaStream stream);
  CudaStatus (*event_query)(CudaEvent event);
  CudaStatus (*get_last_error)();
  const char* (*get_error_string)(CudaStatus status);

  // Throws SystemFailure (ENOMEM when memory ran out) unless `status` is success. `call` names the entry point. The
  // runtime's own record of the error is cleared, so that nobody else in the process trips over it.
  void check(CudaStatus status, const char* call) const;

  // Whether a query says "done"; throws SystemFailure when it says neither that nor "not ready".
  bool done(CudaStatus status, const char* call) const;
};

}  // namespace accelerate_cpp::comm
