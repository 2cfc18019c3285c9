#include "torch_bridge/gradient_reducers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sin.h>
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
    EXPECT_EQ((*known_device_statistics({tensor})[0])[0].item<double>(), 100 * 3.0 * 3.0) << "measured again";
    tensor.mutable_grad() = at::full({100}, 2, at::kFloat);
    EXPECT_EQ((*known_device_statistics({tensor})[0])[0].item<double>(), 100 * 2.0 * 2.0) << "foreign";
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
    EXPECT_EQ(known_statistics({tensor})[0]->sum_of_squares, 100 * 3.0 * 3.0) << "measured again";
    tensor.mutable_grad() = at::full({100}, 2, at::kFloat);
    EXPECT_EQ(known_statistics({tensor})[0]->sum_of_squares, 100 * 2.0 * 2.0) << "foreign";
    tensor.mutable_grad().reset();
    EXPECT_FALSE(known_statistics({tensor})[0]);
  });
}

TEST(GradientReducers, KnowNoOldStatisticsAfterPassesThatWereNotMeasured) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto reducer = reducer_of(communicator, {tensor});
    known_statistics({tensor});
    gradient_after(tensor, rank);
    EXPECT_EQ(known_statistics({tensor})[0]->sum_of_squares, 100 * 1.5 * 1.5);
    for (int pass = 0; pass < 20; ++pass) {
      tensor.mutable_grad().reset();
      tensor.mul(7).sum().backward();
    }
    const auto known = known_statistics({tensor})[0];
    EXPECT_TRUE(!known || known->sum_of_squares == 100 * 7.0 * 7.0) << known->sum_of_squares;
  });
}

TEST(GradientReducers, MeasureAgainToTheLastBitWhatOneRankHasLookedAt) {
  run_ranks(3, [](const Communicator& communicator, int rank) {
    const at::Tensor large = at::full({40001}, 1, at::kFloat).set_requires_grad(true);
    const at::Tensor small = at::full({7}, 1, at::kFloat).set_requires_grad(true);
    const at::Tensor factors = at::arange(40001, at::kFloat).mul(0.37).add(rank).sin();
    const auto reducer = reducer_of(communicator, {large, small});
    known_statistics({large});
    for (int pass = 0; pass < 3; ++pass) {
      large.mutable_grad().reset();
      small.mutable_grad().reset();
      (large.mul(factors).sum() + small.sum()).backward();
      if (rank == pass) {
        large.grad().mul_(1.0);  // it might have changed
      }
      double squares = known_statistics({large})[0]->sum_of_squares;
      double lowest = squares;
      communicator->all_reduce({&squares, 1, DType::kFloat64}, comm::ReduceOp::kMax, comm::testing::soon());
      communicator->all_reduce({&lowest, 1, DType::kFloat64}, comm::ReduceOp::kMin, comm::testing::soon());
      EXPECT_EQ(squares, lowest);
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
