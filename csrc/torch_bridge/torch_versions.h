// What the supported versions of torch, 2.11 and newer, name differently.
#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

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

}  // namespace accelerate_cpp::comm

#undef ACCELERATE_TORCH_BEFORE
