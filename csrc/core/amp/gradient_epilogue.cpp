#include "core/amp/gradient_epilogue.h"

#include <string>

#include "core/base/error.h"
#include "core/base/instruction_set.h"

namespace accelerate_cpp::amp {

namespace portable {
GradientStatistics run(DType dtype, void* data, std::size_t count, double factor, bool writes);
}
#if defined(ACCELERATE_X86_KERNELS)
namespace avx2 {
GradientStatistics run(DType dtype, void* data, std::size_t count, double factor, bool writes);
}
namespace avx512 {
GradientStatistics run(DType dtype, void* data, std::size_t count, double factor, bool writes);
}
#endif

namespace {

GradientStatistics run(DType dtype, void* data, std::size_t count, double factor, bool writes) {
  static const EpilogueKernels best = present_epilogue_kernels().front();
  if (!is_floating(dtype)) {
    throw InvalidArgument(std::string("gradients are floating-point numbers; found ") + name(dtype));
  }
  return best.run(dtype, data, count, factor, writes);
}

}  // namespace

GradientStatistics scale_gradient(MemoryView gradient, double factor) {
  return run(gradient.dtype, gradient.data, gradient.count, factor, true);
}

GradientStatistics measure_gradient(ConstMemoryView gradient) {
  // Nothing is written.
  return run(gradient.dtype, const_cast<void*>(gradient.data), gradient.count, 1.0, false);
}

std::vector<EpilogueKernels> present_epilogue_kernels() {
  std::vector<EpilogueKernels> present;
  for (const InstructionSet set : present_instruction_sets()) {
    present.push_back({name(set), ACCELERATE_SELECT_KERNEL(set, run)});
  }
  return present;
}

}  // namespace accelerate_cpp::amp
