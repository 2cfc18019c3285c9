#include "torch_bridge/gradient_scaling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/base/error.h"

namespace accelerate_cpp::amp {
namespace {

double squares(const at::Tensor& tensor) {
  return tensor.to(at::kDouble).pow(2).sum().item<double>();
}

TEST(GradientScaling, MultipliesAndMeasuresEachTensor) {
  const at::Tensor first = at::randn({300, 1000});
  const at::Tensor second = at::randn({7}).to(at::kBFloat16);
  const at::Tensor expected = first * 0.25;
  const auto statistics = scale_gradients({first, second}, 0.25);
  ASSERT_EQ(statistics.size(), 2u);
  EXPECT_TRUE(first.equal(expected));
  EXPECT_NEAR(statistics[0].sum_of_squares, squares(expected), 1e-6 * squares(expected));
  EXPECT_EQ(statistics[0].num_non_finite, 0u);
  EXPECT_NEAR(statistics[1].sum_of_squares, squares(second), 1e-2 * squares(second));
}

TEST(GradientScaling, WorksOnTensorsWithGapsAndInAnyOrder) {
  const at::Tensor whole = at::randn({6, 8});
  const at::Tensor expected = whole.clone();
  expected.slice(1, 0, 8, 2).mul_(3.0);
  scale_gradients({whole.slice(1, 0, 8, 2)}, 3.0);
  EXPECT_TRUE(whole.equal(expected));
  const at::Tensor turned = whole.t();
  EXPECT_NEAR(measure_gradients({turned})[0].sum_of_squares, squares(whole), 1e-4);
}

TEST(GradientScaling, CountsInfinitiesAndNaNs) {
  const at::Tensor gradient = at::ones({100000});
  gradient[3] = std::numeric_limits<float>::infinity();
  gradient[99999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(measure_gradients({gradient})[0].num_non_finite, 2u);
  EXPECT_EQ(scale_gradients({gradient}, 0.5)[0].num_non_finite, 2u);
}

TEST(GradientScaling, GivesTheSameBitsWithAnyNumberOfThreads) {
  const at::Tensor gradient = at::randn({1000003});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double alone = measure_gradients({gradient})[0].sum_of_squares;
  at::set_num_threads(2);
  const double together = measure_gradients({gradient})[0].sum_of_squares;
  at::set_num_threads(before);
  EXPECT_EQ(alone, together);
}

TEST(GradientScaling, AddsUpWhatASparseGradientHasTwice) {
  const at::Tensor indices = at::tensor({0, 2, 2}, at::kLong).unsqueeze(0);
  const at::Tensor gradient = at::sparse_coo_tensor(indices, at::tensor({1.0f, 2.0f, 3.0f}), {4});
  EXPECT_EQ(measure_gradients({gradient})[0].sum_of_squares, 26.0);
  EXPECT_EQ(scale_gradients({gradient}, 2.0)[0].sum_of_squares, 104.0);
  EXPECT_TRUE(gradient.to_dense().equal(at::tensor({2.0f, 0.0f, 10.0f, 0.0f})));
}

TEST(GradientScaling, TakesAComplexNumberForTwoRealOnes) {
  const at::Tensor gradient = at::full({3}, c10::complex<float>(3.0f, 4.0f), at::kComplexFloat);
  EXPECT_EQ(scale_gradients({gradient}, 2.0)[0].sum_of_squares, 300.0);
  EXPECT_TRUE(gradient.equal(at::full({3}, c10::complex<float>(6.0f, 8.0f), at::kComplexFloat)));
}

TEST(GradientScaling, TellsAutogradThatItHasWritten) {
  const at::Tensor gradient = at::ones({4});
  const auto before = gradient._version();
  measure_gradients({gradient});
  EXPECT_EQ(gradient._version(), before);
  scale_gradients({gradient}, 2.0);
  EXPECT_GT(gradient._version(), before);
}

TEST(GradientScaling, TakesNothingAndEmptyTensors) {
  EXPECT_TRUE(scale_gradients({}, 2.0).empty());
  EXPECT_EQ(scale_gradients({at::ones({0, 3})}, 2.0)[0].sum_of_squares, 0.0);
}

TEST(GradientScaling, RefusesWhatItCannotRead) {
  EXPECT_THAT([] { measure_gradients({at::ones({2}, at::kMeta)}); },
              ::testing::ThrowsMessage<InvalidArgument>(::testing::HasSubstr("found one on meta")));
  EXPECT_THROW(scale_gradients({at::arange(3)}, 2.0), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::amp
