// The kernels of each instruction set, which are compiled from epilogue_loops.h.
#include "core/amp/gradient_epilogue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/base/half.h"

namespace accelerate_cpp::amp {
namespace {

constexpr std::size_t kMargin = 8;  // elements behind the gradient that nobody may touch

double read(float value) {
  return value;
}
double read(double value) {
  return value;
}
double read(Float16 value) {
  return to_float(value);
}
double read(BFloat16 value) {
  return to_float(value);
}

void write(float& to, double value) {
  to = static_cast<float>(value);
}
void write(double& to, double value) {
  to = value;
}
void write(Float16& to, double value) {
  to = to_float16(static_cast<float>(value));
}
void write(BFloat16& to, double value) {
  to = to_bfloat16(static_cast<float>(value));
}

template <class T>
struct Format;
template <>
struct Format<float> {
  static constexpr DType kDType = DType::kFloat32;
};
template <>
struct Format<double> {
  static constexpr DType kDType = DType::kFloat64;
};
template <>
struct Format<Float16> {
  static constexpr DType kDType = DType::kFloat16;
};
template <>
struct Format<BFloat16> {
  static constexpr DType kDType = DType::kBFloat16;
};

template <class T>
std::vector<T> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, 3.0);
  std::vector<T> values(count);
  for (T& value : values) {
    write(value, normal(random));
  }
  return values;
}

template <class T>
class EpilogueLoops : public ::testing::Test {};
using Formats = ::testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(EpilogueLoops, Formats);

TYPED_TEST(EpilogueLoops, ScalesAndMeasuresInOnePassWithEveryInstructionSet) {
  constexpr double kFactor = 0.375;
  for (const EpilogueKernels& kernels : present_epilogue_kernels()) {
    for (const std::size_t count : {0, 1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 100, 4099}) {
      const auto before = random_values<TypeParam>(count + kMargin, static_cast<unsigned>(count));
      auto after = before;
      const GradientStatistics found = kernels.run(Format<TypeParam>::kDType, after.data(), count, kFactor, true);
      double expected = 0.0;
      for (std::size_t i = 0; i < count; ++i) {
        const double product = read(before[i]) * kFactor;
        expected += product * product;
        TypeParam rounded;
        write(rounded, product);
        ASSERT_EQ(read(after[i]), read(rounded)) << kernels.instruction_set << ", element " << i << " of " << count;
      }
      EXPECT_NEAR(found.sum_of_squares, expected, 1e-6 * expected) << kernels.instruction_set << ", count " << count;
      EXPECT_EQ(found.num_non_finite, 0u);
      EXPECT_EQ(std::memcmp(after.data() + count, before.data() + count, kMargin * sizeof(TypeParam)), 0);
    }
  }
}

TYPED_TEST(EpilogueLoops, LeavesWhatItOnlyMeasures) {
  for (const EpilogueKernels& kernels : present_epilogue_kernels()) {
    const auto before = random_values<TypeParam>(1000, 1);
    auto after = before;
    const GradientStatistics found = kernels.run(Format<TypeParam>::kDType, after.data(), after.size(), 1.0, false);
    EXPECT_EQ(std::memcmp(after.data(), before.data(), before.size() * sizeof(TypeParam)), 0);
    EXPECT_GT(found.sum_of_squares, 0.0);
  }
}

TYPED_TEST(EpilogueLoops, CountsWhatIsNotFiniteWhereverItIs) {
  const double kInfinity = std::numeric_limits<double>::infinity();
  for (const EpilogueKernels& kernels : present_epilogue_kernels()) {
    for (const std::size_t place : {0, 1, 17, 40, 76}) {
      auto values = random_values<TypeParam>(77, 2);
      write(values[place], std::nan(""));
      write(values[(place + 1) % 77], kInfinity);
      write(values[(place + 2) % 77], -kInfinity);
      const GradientStatistics found = kernels.run(Format<TypeParam>::kDType, values.data(), 77, 0.5, true);
      EXPECT_EQ(found.num_non_finite, 3u) << kernels.instruction_set << ", place " << place;
      EXPECT_FALSE(std::isfinite(found.sum_of_squares));
      EXPECT_TRUE(std::isnan(read(values[place])));
      EXPECT_EQ(read(values[(place + 1) % 77]), kInfinity);
    }
  }
}

TYPED_TEST(EpilogueLoops, SumsAlikeWithWideAndNarrowVectors) {
  const auto values = random_values<TypeParam>(12345, 3);
  std::vector<double> sums;
  for (const EpilogueKernels& kernels : present_epilogue_kernels()) {
    if (kernels.instruction_set != std::string("portable")) {
      auto copy = values;
      sums.push_back(kernels.run(Format<TypeParam>::kDType, copy.data(), copy.size(), 1.0, false).sum_of_squares);
    }
  }
  for (const double sum : sums) {
    EXPECT_EQ(sum, sums.front());
  }
}

}  // namespace
}  // namespace accelerate_cpp::amp
