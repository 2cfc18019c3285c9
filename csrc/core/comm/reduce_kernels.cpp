#include "core/comm/reduce_kernels.h"

#include <string>

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

struct Kernels {
  void (*reduce)(DType, ReduceOp, const ReduceArguments&);
  const char* instruction_set;
};

Kernels choose() {
#if defined(ACCELERATE_X86_KERNELS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return {avx512::reduce, "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {avx2::reduce, "avx2"};
  }
#endif
  return {portable::reduce, "portable"};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

void check_reduction(DType dtype, ReduceOp op) {
  if (op == ReduceOp::kAvg && !is_floating(dtype)) {
    throw InvalidArgument(
        std::string("an average of ") + name(dtype) +
        " values is not defined; expected a floating dtype. Reduce with sum and divide, or convert first");
  }
}

void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments) {
  kernels().reduce(dtype, op, arguments);
}

const char* reduce_instruction_set() {
  return kernels().instruction_set;
}

}  // namespace accelerate_cpp::comm
