// What the supported versions of torch, 2.11 and newer, and 2.9 and 2.10 for torch_xla, name differently.
#pragma once

#include <c10/core/Stream.h>

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/base/error.h"

#define ACCELERATE_TORCH_BEFORE(major, minor) \
  (TORCH_VERSION_MAJOR < (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR < (minor)))

namespace accelerate_cpp::comm {

#if ACCELERATE_TORCH_BEFORE(2, 12)
inline constexpr auto kReduceScatterTensorCoalesced = ::c10d::OpType::COALESCED;
#else
inline constexpr auto kReduceScatterTensorCoalesced = ::c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

#if ACCELERATE_TORCH_BEFORE(2, 13)
using PreMulSumSupplement = ::c10d::NCCLPreMulSumSupplement;
#else
using PreMulSumSupplement = ::c10d::PreMulSumSupplement;
#endif

// The stream as the driver of its device knows it. What asks for it runs on GPUs, which need torch 2.11.
inline void* native_handle(const c10::Stream& stream) {
#if ACCELERATE_TORCH_BEFORE(2, 11)
  throw InvalidArgument("streams of " + stream.device().str() +
                        ": torch 2.11 or newer is needed to sum gradients there, and this module was built with "
                        "torch " TORCH_VERSION "; install a newer torch, and this package again");
#else
  return stream.native_handle();
#endif
}

}  // namespace accelerate_cpp::comm

#undef ACCELERATE_TORCH_BEFORE
