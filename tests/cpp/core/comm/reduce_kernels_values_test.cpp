#define ACCELERATE_KERNELS values_test
#include "core/comm/reduce_kernels_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

// What reduce_loops.h is made of, for the instruction set of this test; reduce_kernels_test.cpp runs all of them.
namespace accelerate_cpp::comm::values_test {
namespace {

// The first of all equal elements that `Op` makes of vectors of `a` and of `b`.
template <class Op, class T>
T combined(T a, T b) {
  const Vector<T> result = Op::combine(Vector<T>{} + a, Vector<T>{} + b);
  return result[0];
}

TEST(ReduceValues, AreCombinedElementByElement) {
  EXPECT_EQ((combined<Sum>(3.0f, 4.0f)), 7.0f);
  EXPECT_EQ((combined<Product>(std::uint8_t{200}, std::uint8_t{3})), 88);
  EXPECT_EQ((combined<Min>(std::int16_t{-5}, std::int16_t{5})), -5);
  EXPECT_EQ((combined<Max>(std::int64_t{-5}, std::int64_t{5})), 5);
  EXPECT_EQ((combined<BitAnd>(std::uint32_t{12}, std::uint32_t{10})), 8u);
  EXPECT_EQ((combined<BitOr>(std::uint32_t{12}, std::uint32_t{10})), 14u);
  EXPECT_EQ((combined<BitXor>(std::uint32_t{12}, std::uint32_t{10})), 6u);
}

TEST(ReduceValues, AreNaNWhenEitherIs) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan((combined<Min>(nan, 1.0))) && std::isnan((combined<Min>(1.0, nan))));
  EXPECT_TRUE(std::isnan((combined<Max>(nan, 1.0))) && std::isnan((combined<Max>(1.0, nan))));
}

TEST(ReduceValues, AreScaledAtTheEndOrMultipliedByTheFactorOfTheirSource) {
  const double factors[] = {2.0, 5.0};
  const ReduceArguments arguments{nullptr, 0, nullptr, 0, 0, 0.5, factors};
  const Floats threes = Floats{} + 3.0f;
  EXPECT_EQ(ScaledSum<float>(arguments).finish(threes)[0], 1.5f);
  EXPECT_EQ(ScaledSum<float>(arguments).prepare(threes, 1)[0], 3.0f);
  EXPECT_EQ(WeightedSum<float>(arguments).prepare(threes, 1)[0], 15.0f);
  EXPECT_EQ(WeightedSum<float>(arguments).finish(threes)[0], 3.0f);
}

}  // namespace
}  // namespace accelerate_cpp::comm::values_test
