// c10d's reductions in the core's terms.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/comm/options.h"

namespace accelerate_cpp::comm {

// Reads the factor of PREMUL_SUM, a number or a tensor of one element. Throws InvalidArgument for a reduction that the
// core does not have, or that is not meant for complex numbers when `is_complex`.
Reduction reduction_of(const ::c10d::ReduceOp& op, bool is_complex);

}  // namespace accelerate_cpp::comm
