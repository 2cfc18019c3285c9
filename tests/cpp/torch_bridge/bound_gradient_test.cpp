#include "torch_bridge/bound_gradient.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

namespace accelerate_cpp::grad {
namespace {

constexpr amp::GradientStatistics kStatistics{20.0, 0};

TEST(BoundGradient, SharesTheMemoryOfItsSlotAndIsTheOnlyTensorThatIsBound) {
  const at::Tensor slot = at::full({5}, 2, at::kFloat);
  const BoundGradient bound(slot);
  EXPECT_EQ(bound.tensor().data_ptr(), slot.data_ptr());
  EXPECT_TRUE(bound.is(bound.tensor()));
  EXPECT_FALSE(bound.is(slot));
  EXPECT_FALSE(bound.is(at::Tensor()));
  EXPECT_FALSE(BoundGradient().is(at::Tensor()));
}

TEST(BoundGradient, KnowsItsStatisticsUntilItIsWrittenTo) {
  const at::Tensor slot = at::full({5}, 2, at::kFloat);
  const BoundGradient bound(slot, kStatistics);
  ASSERT_TRUE(bound.statistics());
  EXPECT_EQ(std::get<amp::GradientStatistics>(*bound.statistics()).sum_of_squares, 20.0);
  at::Tensor(bound.tensor()).mul_(2);
  EXPECT_FALSE(bound.statistics());
}

TEST(BoundGradient, KnowsWhereItsDeviceHasThemUntilItIsWrittenTo) {
  const at::Tensor slot = at::full({5}, 2, at::kFloat);
  const DeviceRow row{at::full({3, 2}, 7, at::kDouble), 1};
  const BoundGradient bound(slot, row);
  ASSERT_TRUE(bound.statistics());
  EXPECT_EQ(std::get<DeviceRow>(*bound.statistics()).tensor().numel(), 2);
  at::Tensor(bound.tensor()).mul_(2);
  EXPECT_FALSE(bound.statistics());
}

TEST(BoundGradient, NoticesWhatIsWrittenThroughAnEarlierOne) {
  const at::Tensor slot = at::full({5}, 2, at::kFloat);
  const BoundGradient earlier(slot);
  const BoundGradient bound(slot, kStatistics);
  at::Tensor(earlier.tensor()).mul_(2);
  EXPECT_FALSE(bound.statistics());
}

TEST(BoundGradient, TrustsNothingWhileAnotherTensorSharesItsMemory) {
  const at::Tensor slot = at::full({5}, 2, at::kFloat);
  const BoundGradient bound(slot, kStatistics);
  {
    const at::Tensor alias = bound.tensor().detach();
    EXPECT_FALSE(bound.statistics());
  }
  EXPECT_TRUE(bound.statistics());
}

TEST(BoundGradient, HasNoStatisticsUnlessItWasGivenSome) {
  EXPECT_FALSE(BoundGradient(at::full({5}, 2, at::kFloat)).statistics());
  EXPECT_FALSE(BoundGradient().statistics());
}

}  // namespace
}  // namespace accelerate_cpp::grad
