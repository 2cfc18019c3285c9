#include "torch_bridge/gradient_reducers.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include "torch_bridge/reducers_of_threads.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

using testing::Communicator;
using testing::reducer_of;
using testing::run_ranks;

at::Tensor parameter() {
  return at::full({100}, 1, at::kFloat).set_requires_grad(true);
}

// What .grad is after a backward pass in which rank r's gradient is r + 1: 1.5 when it has been averaged.
float gradient_after(const at::Tensor& tensor, int rank) {
  tensor.mutable_grad().reset();
  tensor.mul(rank + 1).sum().backward();
  return tensor.grad()[0].item<float>();
}

TEST(GradientReducers, AverageAParameterOnceHoweverManyHaveIt) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor shared = parameter();
    const at::Tensor own = parameter();
    const auto first = reducer_of(communicator, {shared, own});
    const auto second = reducer_of(communicator, {shared});
    for (int pass = 0; pass < 5; ++pass) {
      EXPECT_EQ(gradient_after(shared, rank), 1.5f);
      own.mutable_grad().reset();
      shared.mutable_grad().reset();
      (shared.mul(rank + 1).sum() + own.mul(rank + 1).sum()).backward();
      EXPECT_EQ(shared.grad()[0].item<float>(), 1.5f);
      EXPECT_EQ(own.grad()[0].item<float>(), 1.5f);
    }
  });
}

TEST(GradientReducers, AverageAParameterWhenAnyThatHasItDoes) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto first = reducer_of(communicator, {tensor});
    const auto second = reducer_of(communicator, {tensor});
    second->set_synchronizing(false);
    EXPECT_EQ(gradient_after(tensor, rank), 1.5f);
    first->set_synchronizing(false);
    EXPECT_EQ(gradient_after(tensor, rank), static_cast<float>(rank + 1));
  });
}

TEST(GradientReducers, HaveTheirParametersBackWhenTheNewerOneIsGone) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto first = reducer_of(communicator, {tensor});
    reducer_of(communicator, {tensor});
    first->set_synchronizing(true);
    EXPECT_EQ(gradient_after(tensor, rank), 1.5f);
  });
}

TEST(GradientReducers, KnowWhereADeviceHasStatisticsAndBelieveThemAsLong) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    ReducerOptions options = testing::kOptions;
    options.device_group =
        DeviceGroup{[communicator](const at::Tensor& bucket) {
                      return [communicator, bucket] {
                        communicator->all_reduce(view_of(bucket), comm::ReduceOp::kSum, comm::testing::soon());
                      };
                    },
                    [] {},
                    {}};
    const auto reducer = reducer_of(communicator, {tensor}, options);
    gradient_after(tensor, rank);
    EXPECT_FALSE(known_device_statistics({tensor})[0]);
    gradient_after(tensor, rank);
    EXPECT_FALSE(known_statistics({tensor})[0]);
    const auto known = known_device_statistics({parameter(), tensor});
    EXPECT_FALSE(known[0]);
    ASSERT_TRUE(known[1]);
    EXPECT_EQ((*known[1])[0].item<double>(), 100 * 1.5 * 1.5);
    tensor.grad().mul_(2);
    EXPECT_FALSE(known_device_statistics({tensor})[0]);
  });
}

TEST(GradientReducers, KnowStatisticsOnceTheyHaveBeenAskedForThem) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const at::Tensor stranger = parameter();
    const auto reducer = reducer_of(communicator, {tensor});
    gradient_after(tensor, rank);
    EXPECT_FALSE(known_statistics({tensor})[0]);
    gradient_after(tensor, rank);
    const auto known = known_statistics({stranger, tensor});
    EXPECT_FALSE(known[0]);
    ASSERT_TRUE(known[1]);
    EXPECT_EQ(known[1]->sum_of_squares, 100 * 1.5 * 1.5);
    tensor.grad().mul_(2);
    EXPECT_FALSE(known_statistics({tensor})[0]);
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
