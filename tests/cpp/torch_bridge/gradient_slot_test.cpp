#include "torch_bridge/gradient_slot.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

using State = GradientSlot::State;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class GradientSlotTest : public ::testing::Test {
 protected:
  GradientSlotTest() { slot_.place(at::zeros({4})); }

  void set_gradient(float value) { parameter_.mutable_grad() = at::full({4}, value); }
  float gradient() const { return parameter_.grad()[3].item<float>(); }
  float in_memory() const { return slot_.memory()[3].item<float>(); }

  at::Tensor parameter_ = at::full({4}, 1, at::kFloat).set_requires_grad(true);
  GradientSlot slot_{"weight", parameter_};
};

TEST_F(GradientSlotTest, IsEmptyForeignOwnAndAveragedInTurn) {
  EXPECT_EQ(slot_.state(), State::kEmpty);
  set_gradient(2);
  EXPECT_EQ(slot_.state(), State::kForeign);
  slot_.take_gradient();
  EXPECT_EQ(slot_.state(), State::kOwn);
  EXPECT_EQ(in_memory(), 2.0f);
  slot_.take_average({}, /*is_weighed=*/false);
  EXPECT_EQ(slot_.state(), State::kAveraged);
  slot_.note_arrival();
  EXPECT_EQ(slot_.state(), State::kOwn);
  parameter_.mutable_grad().reset();
  EXPECT_EQ(slot_.state(), State::kEmpty);
}

TEST_F(GradientSlotTest, HoldsZerosForTheSumWhenThereIsNoGradient) {
  set_gradient(2);
  EXPECT_TRUE(slot_.prepare_for_sum(1.0));
  slot_.take_average({}, /*is_weighed=*/false);
  parameter_.mutable_grad().reset();
  EXPECT_FALSE(slot_.prepare_for_sum(1.0));
  EXPECT_EQ(in_memory(), 0.0f);
}

TEST_F(GradientSlotTest, WeighsAnAverageToWhichNothingWasAddedAndNothingElse) {
  set_gradient(2);
  EXPECT_TRUE(slot_.prepare_for_sum(3.0));
  EXPECT_EQ(in_memory(), 2.0f) << "a gradient of this rank";
  slot_.take_average({}, /*is_weighed=*/true);
  EXPECT_TRUE(slot_.prepare_for_sum({}));
  EXPECT_EQ(in_memory(), 2.0f) << "in a pass in which all weigh the same";
  EXPECT_TRUE(slot_.prepare_for_sum(3.0));
  EXPECT_EQ(in_memory(), 6.0f) << "an average, of which this rank has three parts";
  slot_.note_arrival();
  EXPECT_TRUE(slot_.prepare_for_sum(3.0));
  EXPECT_EQ(in_memory(), 6.0f) << "one to which a pass has added";
}

TEST_F(GradientSlotTest, LeavesAnAverageThatHasYetToBeDividedByWeightsAsItIs) {
  set_gradient(2);
  EXPECT_TRUE(slot_.prepare_for_sum({}));
  slot_.take_average({}, /*is_weighed=*/false);
  EXPECT_TRUE(slot_.prepare_for_sum(3.0));
  EXPECT_EQ(in_memory(), 2.0f);
}

TEST_F(GradientSlotTest, TakesWhatLiesThereAlongToAnotherPlace) {
  set_gradient(5);
  slot_.take_gradient();
  slot_.place(at::zeros({4}));
  EXPECT_EQ(slot_.state(), State::kOwn);
  EXPECT_EQ(in_memory(), 5.0f);
  set_gradient(7);
  slot_.place(at::zeros({4}));
  EXPECT_EQ(slot_.state(), State::kForeign) << "which stays where it is";
  EXPECT_EQ(gradient(), 7.0f);
}

TEST_F(GradientSlotTest, TakesAwayTheGradientOfARankThatAddsNothing) {
  set_gradient(5);
  slot_.take_gradient();
  slot_.prepare_without_gradient();
  EXPECT_FALSE(parameter_.grad().defined());
  EXPECT_EQ(in_memory(), 0.0f);
}

TEST_F(GradientSlotTest, BelievesAMeasurementUntilTheGradientIsWrittenToButKnowsThatThereWasOne) {
  slot_.take_average(amp::GradientStatistics{4.0, 0}, /*is_weighed=*/false);
  EXPECT_TRUE(slot_.was_measured());
  EXPECT_TRUE(slot_.believed());
  parameter_.grad().mul_(2);
  EXPECT_TRUE(slot_.was_measured());
  EXPECT_FALSE(slot_.believed());
  slot_.take_average({}, /*is_weighed=*/false);
  EXPECT_FALSE(slot_.was_measured());
}

TEST_F(GradientSlotTest, GivesTheElementsInItsOwnOrder) {
  EXPECT_FALSE(slot_.gradient_in_order().defined());
  const at::Tensor table = at::full({2, 3}, 1, at::kFloat).t().set_requires_grad(true);
  GradientSlot transposed("table", table);
  transposed.place(at::zeros({2, 3}).t());
  table.mutable_grad() = at::full({3, 2}, 1, at::kFloat);
  table.mutable_grad()[0][1] = 9;
  const at::Tensor ordered = transposed.gradient_in_order();
  EXPECT_EQ(ordered.strides(), table.strides());
  EXPECT_EQ(ordered.data_ptr<float>()[3], 9.0f);
}

TEST_F(GradientSlotTest, RefusesAGradientWithAGraph) {
  parameter_.mutable_grad() = parameter_.mul(2);
  EXPECT_THAT([&] { slot_.take_gradient(); }, ThrowsMessage<InvalidArgument>(HasSubstr("create_graph=True")));
}

}  // namespace
}  // namespace accelerate_cpp::grad
