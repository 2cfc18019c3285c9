#include "core/base/instruction_set.h"

#if defined(ACCELERATE_X86_KERNELS)
#include <cpuid.h>
#endif

namespace accelerate_cpp {

#if defined(ACCELERATE_X86_KERNELS)
namespace {

// Conversions between half and float. (Not every compiler's __builtin_cpu_supports knows the name.)
bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      return "portable";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<InstructionSet> present_instruction_sets() {
  std::vector<InstructionSet> present;
#if defined(ACCELERATE_X86_KERNELS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    present.push_back(InstructionSet::kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && has_f16c()) {
    present.push_back(InstructionSet::kAvx2);
  }
#endif
  present.push_back(InstructionSet::kPortable);
  return present;
}

}  // namespace accelerate_cpp
