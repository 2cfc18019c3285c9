// Element-wise reduction of several arrays into one result that is stored in several places.
//
// Sources are combined in the order given, so every rank that reduces the same elements gets the same bits. Half and
// bfloat16 accumulate in float and are rounded once. The instruction set is chosen at run time. Results too large for
// the caches are stored past them, unless they replace a source.
#pragma once

#include <cstddef>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

struct ReduceArguments {
  const void* const* sources;  // num_sources arrays of `count` elements, each aligned to its element
  int num_sources;
  void* const* destinations;  // num_destinations arrays; one may be the same array as a source, but may not overlap it
  int num_destinations;
  std::size_t count;
  double scale;                     // multiplies sums and averages of floating types; ignored for all else
  const double* factors = nullptr;  // one per source, for kPreMulSum; null for all else
};

// Throws InvalidArgument when `op` has no meaning for `dtype`: an average or a sum with factors of integers or
// booleans, bitwise operations on floating types.
void check_reduction(DType dtype, ReduceOp op);

// Combines all sources and writes the result to all destinations. kAvg combines like kSum: its divisor is `scale`.
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);

// The instruction set in use: "avx512", "avx2" or "portable".
const char* reduce_instruction_set();

// reduce() for one instruction set, without its checks of the arguments. All give the same bits.
struct ReduceKernels {
  const char* instruction_set;
  void (*reduce)(DType, ReduceOp, const ReduceArguments&);
};

// The instruction sets that this processor can run, the best first.
std::vector<ReduceKernels> present_reduce_kernels();

}  // namespace accelerate_cpp::comm
