// Compiled where the headers of the CUDA toolkit are: our declarations against theirs. A difference does not compile.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "core/comm/nccl/cuda_api.h"
#include "core/comm/nccl/same_declaration.h"

namespace accelerate_cpp::comm::testing {
namespace {

#define ACCELERATE_SAME(ours, theirs)                                           \
  static_assert(kSameDeclaration<decltype(CudaApi::ours), decltype(&::theirs)>, \
                "CudaApi::" #ours " is declared unlike " #theirs)

ACCELERATE_SAME(get_device_count, cudaGetDeviceCount);
ACCELERATE_SAME(get_device, cudaGetDevice);
ACCELERATE_SAME(set_device, cudaSetDevice);
ACCELERATE_SAME(device_synchronize, cudaDeviceSynchronize);
ACCELERATE_SAME(allocate, cudaMalloc);
ACCELERATE_SAME(release, cudaFree);
ACCELERATE_SAME(stream_create, cudaStreamCreateWithFlags);
ACCELERATE_SAME(stream_destroy, cudaStreamDestroy);
ACCELERATE_SAME(stream_wait_event, cudaStreamWaitEvent);
ACCELERATE_SAME(event_create, cudaEventCreateWithFlags);
ACCELERATE_SAME(event_destroy, cudaEventDestroy);
ACCELERATE_SAME(event_record, cudaEventRecord);
ACCELERATE_SAME(event_query, cudaEventQuery);
ACCELERATE_SAME(get_last_error, cudaGetLastError);
ACCELERATE_SAME(get_error_string, cudaGetErrorString);

static_assert(static_cast<int>(CudaStatus::kSuccess) == cudaSuccess);
static_assert(static_cast<int>(CudaStatus::kMemoryAllocation) == cudaErrorMemoryAllocation);
static_assert(static_cast<int>(CudaStatus::kNotReady) == cudaErrorNotReady);
static_assert(kCudaStreamNonBlocking == cudaStreamNonBlocking);
static_assert(kCudaEventDisableTiming == cudaEventDisableTiming);

TEST(CudaDeclarations, WereComparedWithAToolkitThatCounts) {
  EXPECT_GE(CUDART_VERSION, 11000) << "older runtimes number cudaErrorNotReady otherwise";
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
