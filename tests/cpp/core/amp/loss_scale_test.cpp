#include "core/amp/loss_scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace accelerate_cpp::amp {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

LossScaleOptions options(double init_scale, int growth_interval) {
  LossScaleOptions result;
  result.init_scale = init_scale;
  result.growth_interval = growth_interval;
  return result;
}

TEST(LossScale, BacksOffAtEachOverflow) {
  LossScale scale(options(1024.0, 2));
  scale.update(true);
  EXPECT_EQ(scale.value(), 512.0);
  scale.update(true);
  EXPECT_EQ(scale.value(), 256.0);
}

TEST(LossScale, GrowsAfterAnIntervalWithoutOverflow) {
  LossScale scale(options(1024.0, 3));
  scale.update(false);
  scale.update(false);
  EXPECT_EQ(scale.value(), 1024.0);
  EXPECT_EQ(scale.growth_tracker(), 2);
  scale.update(false);
  EXPECT_EQ(scale.value(), 2048.0);
  EXPECT_EQ(scale.growth_tracker(), 0);
}

TEST(LossScale, CountsTheIntervalAnewAfterAnOverflow) {
  LossScale scale(options(1024.0, 2));
  scale.update(false);
  scale.update(true);
  scale.update(false);
  EXPECT_EQ(scale.value(), 512.0);
  scale.update(false);
  EXPECT_EQ(scale.value(), 1024.0);
}

TEST(LossScale, StaysWithinWhatAFloatCanHoldAndInvert) {
  LossScale large(options(FLT_MAX / 2, 1));
  for (int i = 0; i < 10; ++i) {
    large.update(false);
  }
  EXPECT_LE(large.value(), FLT_MAX);
  EXPECT_GT(large.value(), FLT_MAX / 4);
  LossScale small(options(1.0, 1));
  for (int i = 0; i < 300; ++i) {
    small.update(true);
  }
  EXPECT_GT(small.value(), 0.0);
  EXPECT_TRUE(std::isfinite(1.0f / static_cast<float>(small.value())));
}

TEST(LossScale, StartsOverFromAnotherValue) {
  LossScale scale(options(8.0, 2));
  scale.update(false);
  scale.set(32.0);
  EXPECT_EQ(scale.value(), 32.0);
  EXPECT_EQ(scale.growth_tracker(), 0);
}

TEST(LossScale, ContinuesFromASavedState) {
  LossScale scale(options(8.0, 2));
  LossScaleOptions saved = options(1.0, 4);
  saved.growth_factor = 3.0;
  scale.restore(16.0, 3, saved);
  scale.update(false);
  EXPECT_EQ(scale.value(), 48.0);
}

TEST(LossScale, RefusesWhatCannotWork) {
  LossScaleOptions shrinking;
  shrinking.growth_factor = 1.0;
  EXPECT_THAT([&] { LossScale{shrinking}; }, ThrowsMessage<InvalidArgument>(HasSubstr("growth_factor")));
  LossScaleOptions growing;
  growing.backoff_factor = 1.0;
  EXPECT_THAT([&] { LossScale{growing}; }, ThrowsMessage<InvalidArgument>(HasSubstr("backoff_factor")));
  EXPECT_THAT([] { LossScale{options(1.0, 0)}; }, ThrowsMessage<InvalidArgument>(HasSubstr("growth_interval")));
  for (const double scale : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan(""), 1e300}) {
    EXPECT_THROW(LossScale{options(scale, 1)}, InvalidArgument) << scale;
  }
  LossScale scale(options(8.0, 2));
  EXPECT_THROW(scale.set(0.0), InvalidArgument);
  EXPECT_THROW(scale.restore(8.0, -1, {}), InvalidArgument);
  EXPECT_EQ(scale.value(), 8.0);
}

}  // namespace
}  // namespace accelerate_cpp::amp
