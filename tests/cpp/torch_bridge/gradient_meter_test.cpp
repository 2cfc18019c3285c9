#include "torch_bridge/gradient_meter.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <cmath>

namespace accelerate_cpp::grad {
namespace {

at::Tensor parameter(at::ScalarType dtype = at::kFloat) {
  return at::full({100}, 1, dtype).set_requires_grad(true);
}

// Adds a gradient of `value` to the parameter's.
void pass(const at::Tensor& tensor, double value) {
  tensor.mul(value).sum().backward();
}

double squares(GradientMeter& meter, const at::Tensor& tensor) {
  const auto statistics = meter.statistics(tensor);
  return statistics ? statistics->sum_of_squares : -1.0;
}

TEST(GradientMeter, MeasuresOnceItHasBeenAsked) {
  const at::Tensor tensor = parameter();
  const auto meter = GradientMeter::create({tensor});
  pass(tensor, 1);
  EXPECT_EQ(squares(*meter, tensor), -1.0);
  tensor.mutable_grad().reset();
  pass(tensor, 3);
  EXPECT_EQ(squares(*meter, tensor), 900.0);
  EXPECT_EQ(squares(*meter, parameter()), -1.0) << "not one of its own";
}

TEST(GradientMeter, MeasuresTheSumOfSeveralPasses) {
  const at::Tensor tensor = parameter();
  const auto meter = GradientMeter::create({tensor});
  squares(*meter, tensor);
  pass(tensor, 1);
  pass(tensor, 1);
  EXPECT_EQ(squares(*meter, tensor), 400.0);
}

TEST(GradientMeter, DoesNotBelieveFiguresOfAGradientThatWasChangedReplacedOrShared) {
  const at::Tensor tensor = parameter();
  const auto meter = GradientMeter::create({tensor});
  squares(*meter, tensor);
  const auto fresh = [&] {
    tensor.mutable_grad().reset();
    pass(tensor, 1);
    ASSERT_EQ(squares(*meter, tensor), 100.0);
  };
  fresh();
  tensor.grad().mul_(2);
  EXPECT_EQ(squares(*meter, tensor), -1.0);
  fresh();
  tensor.mutable_grad() = at::full({100}, 5, at::kFloat);
  EXPECT_EQ(squares(*meter, tensor), -1.0);
  fresh();
  const at::Tensor view = tensor.grad().detach();
  EXPECT_EQ(squares(*meter, tensor), -1.0);
}

TEST(GradientMeter, KeepsNoGradientAlive) {
  const at::Tensor tensor = parameter();
  const auto meter = GradientMeter::create({tensor});
  squares(*meter, tensor);
  pass(tensor, 1);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.grad().storage().getWeakStorageImpl());
  tensor.mutable_grad().reset();
  EXPECT_TRUE(storage.expired());
}

TEST(GradientMeter, StopsWhenNobodyAsksAnyMoreAndWhenItEnds) {
  const at::Tensor tensor = parameter();
  auto meter = GradientMeter::create({tensor});
  squares(*meter, tensor);
  for (int i = 0; i <= kPassesToMeasure; ++i) {
    pass(tensor, 1);
  }
  EXPECT_EQ(squares(*meter, tensor), -1.0);
  meter.reset();
  pass(tensor, 1);
}

TEST(GradientMeter, LeavesOtherGradientsAlone) {
  const at::Tensor frozen = at::full({3}, 1, at::kFloat);
  const at::Tensor complex = parameter(at::kComplexFloat);
  const auto meter = GradientMeter::create({frozen, complex});
  squares(*meter, complex);
  at::Tensor loss = complex.mul(2).sum();
  at::real(loss).backward();
  EXPECT_EQ(squares(*meter, complex), -1.0);
  EXPECT_EQ(squares(*meter, frozen), -1.0);
}

TEST(GradientMeter, CountsWhatIsNotFinite) {
  const at::Tensor tensor = parameter(at::kHalf);
  const auto meter = GradientMeter::create({tensor});
  squares(*meter, tensor);
  pass(tensor, INFINITY);
  ASSERT_TRUE(meter->statistics(tensor));
  EXPECT_EQ(meter->statistics(tensor)->num_non_finite, 100u);
}

}  // namespace
}  // namespace accelerate_cpp::grad
