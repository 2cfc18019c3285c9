// The vector instructions that this processor has, as far as kernels are compiled for them.
//
// A kernel that gains from them is compiled once per set, in namespaces `portable`, `avx2` and `avx512`, and chosen at
// run time, so that one build runs everywhere.
#pragma once

#include <vector>

namespace accelerate_cpp {

enum class InstructionSet { kPortable, kAvx2, kAvx512 };

// "portable", "avx2" or "avx512".
const char* name(InstructionSet set);

// The best first; kPortable last.
std::vector<InstructionSet> present_instruction_sets();

}  // namespace accelerate_cpp

// The `kernel` for a set: a function declared in the three namespaces, of which this build has one or all.
#if defined(ACCELERATE_X86_KERNELS)
#define ACCELERATE_SELECT_KERNEL(set, kernel)                          \
  ((set) == ::accelerate_cpp::InstructionSet::kAvx512 ? avx512::kernel \
   : (set) == ::accelerate_cpp::InstructionSet::kAvx2 ? avx2::kernel   \
                                                      : portable::kernel)
#else
#define ACCELERATE_SELECT_KERNEL(set, kernel) ((void)(set), portable::kernel)
#endif
