#include "core/grad/gradient_exchange.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

TEST(WeightsOfGradients, AreFiniteAndNotNegative) {
  EXPECT_EQ(checked_weight(0.0), 0.0);
  EXPECT_EQ(checked_weight(2.5), 2.5);
  for (const double weight : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_THROW(checked_weight(weight), InvalidArgument) << weight;
  }
}

TEST(WeightsOfGradients, ThatAddUpToNothingMakeAveragesNothing) {
  EXPECT_EQ(inverse(4.0), 0.25);
  EXPECT_EQ(inverse(0.0), 0.0);
}

}  // namespace
}  // namespace accelerate_cpp::grad
