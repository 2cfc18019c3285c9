// NCCL itself as what sums gradient buckets on GPUs, in place of a process group of torch.
//
// Sums run on a stream of their own, beside the backward pass: each begins when the work that was on the caller's
// current stream has ended, and holds back the stream on which its result is awaited. Buckets lie in memory that is
// registered with NCCL where the library does that.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>

#include "core/comm/nccl/nccl_comm.h"
#include "core/comm/store.h"
#include "torch_bridge/device_gradient_exchange.h"

namespace accelerate_cpp::grad {

// The stream that the calling thread's work on the device is put on.
using CurrentStream = std::function<comm::CudaStream()>;

// Torch's, of `device`.
CurrentStream current_stream_of_torch(const c10::Device& device);

// The group of the ranks of `comm`. abort() ends `comm`.
DeviceGroup nccl_device_group(std::shared_ptr<comm::NcclComm> comm, CurrentStream current_stream,
                              std::shared_ptr<const cuda::LoadedSlotKernels> kernels = nullptr);

// The libraries that torch's CUDA wheels bring along, or the dynamic linker finds, for `device`. Throws SystemFailure
// where there are none, and InvalidArgument when the device is not CUDA's.
comm::NcclContext nccl_on(const c10::Device& device);

}  // namespace accelerate_cpp::grad
