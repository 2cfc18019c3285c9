#include "core/amp/gradient_epilogue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/instruction_set.h"

namespace accelerate_cpp::amp {
namespace {

TEST(GradientEpilogues, SquareWhatAFloatCouldNotHold) {
  std::vector<float> values(3, 1e30f);
  EXPECT_NEAR(measure_gradient({values.data(), 3, DType::kFloat32}).sum_of_squares, 3e60, 1e54);
}

TEST(GradientEpilogues, AddUp) {
  std::vector<double> values{3.0, 4.0};
  GradientStatistics total = scale_gradient({values.data(), 2, DType::kFloat64}, 2.0);
  EXPECT_EQ(values, (std::vector<double>{6.0, 8.0}));
  values.push_back(std::nan(""));
  total += measure_gradient({values.data() + 2, 1, DType::kFloat64});
  EXPECT_EQ(total.num_non_finite, 1u);
  total = {};
  total += measure_gradient({values.data(), 2, DType::kFloat64});
  EXPECT_EQ(total.sum_of_squares, 100.0);
}

TEST(GradientEpilogues, HaveKernelsForEveryInstructionSet) {
  const std::vector<EpilogueKernels> kernels = present_epilogue_kernels();
  const std::vector<InstructionSet> sets = present_instruction_sets();
  ASSERT_EQ(kernels.size(), sets.size());
  for (std::size_t k = 0; k < sets.size(); ++k) {
    EXPECT_EQ(kernels[k].instruction_set, std::string(name(sets[k])));
  }
}

TEST(GradientEpilogues, RefuseIntegers) {
  std::int64_t value = 1;
  EXPECT_THAT([&] { scale_gradient({&value, 1, DType::kInt64}, 1.0); },
              ::testing::ThrowsMessage<InvalidArgument>(::testing::HasSubstr("found int64")));
}

}  // namespace
}  // namespace accelerate_cpp::amp
