// Sums of multiples, as a reduction; torch before 2.13 makes them by another name.
#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace accelerate_cpp::comm::testing {

// `factor` is a number or a tensor of one.
template <typename Factor>
::c10d::ReduceOp pre_mul_sum(const Factor& factor) {
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13)
  return ::c10d::makeNCCLPreMulSum(factor);
#else
  return ::c10d::makePreMulSum(factor);
#endif
}

}  // namespace accelerate_cpp::comm::testing
