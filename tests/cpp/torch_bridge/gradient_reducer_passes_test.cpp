// GradientReducer in backward passes with weights, sparse gradients, and ranks that have no batches any more.
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "torch_bridge/reducers_of_threads.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::message_of;
using testing::Communicator;
using ::testing::HasSubstr;
using testing::reducer_of_named;
using testing::run_ranks;

at::Tensor parameter() {
  return at::full({100}, 1, at::kFloat).set_requires_grad(true);
}

TEST(GradientReducerPasses, DivideOnceByTheSumOfTheWeights) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto reducer = reducer_of_named(communicator, {{"weight", tensor}});
    reducer->set_weight(rank == 0 ? 6.0 : 2.0);
    tensor.mul(rank == 0 ? 4 : 12).sum().backward();
    EXPECT_EQ(tensor.grad()[0].item<float>(), 2.0f);
    tensor.mutable_grad().reset();
    tensor.mul(rank == 0 ? 4 : 12).sum().backward();
    EXPECT_EQ(tensor.grad()[0].item<float>(), 8.0f) << "the next one is a mean again";
  });
}

// What sums buckets as a process group of torch would, unless `fails` says otherwise.
DeviceGroup group_of(const Communicator& communicator, const bool& fails, int& num_ended) {
  return {[communicator, &fails](const at::Tensor& bucket) {
            return [communicator, bucket, &fails] {
              communicator->all_reduce(view_of(bucket), comm::ReduceOp::kSum, comm::testing::soon());
              if (fails) {
                throw SystemFailure("a sum", 5);
              }
            };
          },
          [&num_ended] { ++num_ended; },
          {}};
}

TEST(GradientReducerPasses, EndTheGroupOfARankThatFailsAndGoOnWithAnother) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    ReducerOptions options = testing::kOptions;
    bool fails = false;
    int num_ended = 0;
    options.device_group = group_of(communicator, fails, num_ended);
    const auto backward = [&] { tensor.mul(2 * rank).sum().backward(); };
    for (int attempt = 1; attempt <= 2; ++attempt) {
      const auto reducer = reducer_of_named(communicator, {{"weight", tensor}}, options);
      backward();
      EXPECT_EQ(tensor.grad()[0].item<float>(), 1.0f);
      if (rank == 1) {
        reducer->expect_backward();
        reducer->backward_failed("out of memory");
      } else {
        EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("out of memory"));
      }
      EXPECT_EQ(num_ended, attempt);
      EXPECT_FALSE(tensor.grad().defined());
      EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("the next forward pass"));
      tensor.mutable_grad().reset();
    }
  });
}

TEST(GradientReducerPasses, EndEverythingWhenOneRankFailsWhereTheOthersHaveCompleted) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    ReducerOptions options = testing::kOptions;
    bool fails = false;
    int num_ended = 0;
    options.device_group = group_of(communicator, fails, num_ended);
    const auto reducer = reducer_of_named(communicator, {{"weight", tensor}}, options);
    const auto backward = [&] { tensor.mul(2 * rank).sum().backward(); };
    backward();
    fails = rank == 1;
    if (rank == 1) {
      EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("a sum"));
      EXPECT_EQ(num_ended, 1);
    } else {
      backward();
      EXPECT_EQ(num_ended, 0);
      EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("rank 1"));
    }
  });
}

TEST(GradientReducerPasses, TakeBackAWeightThatWasNotUsed) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto reducer = reducer_of_named(communicator, {{"weight", tensor}});
    reducer->set_weight(5.0);
    reducer->set_weight(std::nullopt);
    tensor.mul(2 * rank).sum().backward();
    EXPECT_EQ(tensor.grad()[0].item<float>(), 1.0f);
  });
}

TEST(GradientReducerPasses, LeaveOutARankThatHasNoGradients) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const auto reducer = reducer_of_named(communicator, {{"weight", tensor}});
    for (int pass = 0; pass < 3; ++pass) {
      if (rank == 1) {
        reducer->take_part_without_gradients();
        EXPECT_FALSE(tensor.grad().defined());
        continue;
      }
      tensor.mutable_grad().reset();
      reducer->set_weight(4.0);
      tensor.mul(8).sum().backward();
      EXPECT_EQ(tensor.grad()[0].item<float>(), 2.0f);
    }
  });
}

TEST(GradientReducerPasses, AverageSparseGradientsBesideDenseOnes) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor table = at::full({4, 2}, 1, at::kFloat).set_requires_grad(true);
    const at::Tensor dense = parameter();
    const auto reducer = reducer_of_named(communicator, {{"table", table, true}, {"dense", dense}});
    for (int pass = 0; pass < 2; ++pass) {
      table.mutable_grad().reset();
      dense.mutable_grad().reset();
      const at::Tensor rows = at::embedding(table, at::tensor({rank, 3}, at::kLong), -1, false, /*sparse=*/true);
      (rows.sum() + dense.mul(2 * rank).sum()).backward();
      const at::Tensor expected = at::tensor({0.5f, 0.5f, 0.5f, 0.5f, 0.0f, 0.0f, 1.0f, 1.0f}).view({4, 2});
      EXPECT_TRUE(table.grad().to_dense().equal(expected));
      EXPECT_EQ(dense.grad()[0].item<float>(), 1.0f);
    }
  });
}

TEST(GradientReducerPasses, NameTheParameterThatIsNotAsAnnounced) {
  run_ranks(2, [](const Communicator& communicator, int) {
    const at::Tensor table = at::full({4, 2}, 1, at::kFloat).set_requires_grad(true);
    const auto reducer = reducer_of_named(communicator, {{"table", table}});
    const at::Tensor rows = at::embedding(table, at::tensor({1, 3}, at::kLong), -1, false, /*sparse=*/true);
    EXPECT_THAT(message_of<InvalidArgument>([&] { rows.sum().backward(); }),
                HasSubstr("parameter table received a sparse gradient"));
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
