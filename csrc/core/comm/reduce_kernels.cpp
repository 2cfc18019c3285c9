#include "core/comm/reduce_kernels.h"

#include <string>
#if defined(ACCELERATE_X86_KERNELS)
#include <cpuid.h>
#endif

#include "core/base/check.h"
#include "core/base/error.h"

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

#if defined(ACCELERATE_X86_KERNELS)
// Conversions between half and float. (Not every compiler's __builtin_cpu_supports knows the name.)
bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

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
#if defined(ACCELERATE_X86_KERNELS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    present.push_back({"avx512", avx512::reduce});
  }
  if (__builtin_cpu_supports("avx2") && has_f16c()) {
    present.push_back({"avx2", avx2::reduce});
  }
#endif
  present.push_back({"portable", portable::reduce});
  return present;
}

}  // namespace accelerate_cpp::comm
