#include "core/comm/reduce_kernels.h"

#include <string>

#include "core/base/check.h"
#include "core/base/error.h"
#include "core/base/instruction_set.h"

namespace accelerate_cpp::comm {

namespace portable {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
#if defined(ACCELERATE_X86_KERNELS)
namespace avx2 {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
namespace avx512 {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
#endif

namespace {

const ReduceKernels& best_kernels() {
  static const ReduceKernels best = present_reduce_kernels().front();
  return best;
}

}  // namespace

void check_reduction(DType dtype, ReduceOp op) {
  const bool is_average = op == ReduceOp::kAvg;
  if ((is_average || op == ReduceOp::kPreMulSum) && !is_floating(dtype)) {
    throw InvalidArgument(std::string(is_average ? "an average" : "a sum with factors") + " of " + name(dtype) +
                          " values is not defined; expected a floating dtype. " +
                          (is_average ? "Reduce with sum and divide" : "Multiply and reduce with sum") +
                          ", or convert first");
  }
  const bool is_bitwise = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
  if (is_bitwise && is_floating(dtype)) {
    throw InvalidArgument(std::string("the bitwise reduction ") + name(op) + " of " + name(dtype) +
                          " values is not defined; expected an integer dtype or bool. Convert first");
  }
}

void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments) {
  check_reduction(dtype, op);
  ACCELERATE_CHECK((op == ReduceOp::kPreMulSum) == (arguments.factors != nullptr), name(op));
  best_kernels().reduce(dtype, op, arguments);
}

const char* reduce_instruction_set() {
  return best_kernels().instruction_set;
}

std::vector<ReduceKernels> present_reduce_kernels() {
  std::vector<ReduceKernels> present;
  for (const InstructionSet set : present_instruction_sets()) {
    present.push_back({name(set), ACCELERATE_SELECT_KERNEL(set, reduce)});
  }
  return present;
}

}  // namespace accelerate_cpp::comm
