#include "core/base/instruction_set.h"

#include <gtest/gtest.h>

#include <string>

namespace accelerate_cpp {
namespace {

TEST(InstructionSets, EndWithTheOneThatEveryProcessorHas) {
  const std::vector<InstructionSet> present = present_instruction_sets();
  ASSERT_FALSE(present.empty());
  EXPECT_EQ(present.back(), InstructionSet::kPortable);
}

TEST(InstructionSets, AreListedOnceTheBestFirst) {
  const std::vector<InstructionSet> present = present_instruction_sets();
  for (std::size_t k = 1; k < present.size(); ++k) {
    EXPECT_GT(present[k - 1], present[k]);
  }
}

TEST(InstructionSets, HaveNames) {
  EXPECT_EQ(name(InstructionSet::kPortable), std::string("portable"));
  EXPECT_EQ(name(InstructionSet::kAvx2), std::string("avx2"));
  EXPECT_EQ(name(InstructionSet::kAvx512), std::string("avx512"));
}

}  // namespace
}  // namespace accelerate_cpp
