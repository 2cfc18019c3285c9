#include "torch_bridge/hooked_gradient_exchange.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/solo.h"
#include "core/grad/gradient_exchange_conformance.h"
#include "torch_bridge/reducers_of_threads.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::soon;
using ::testing::ElementsAre;

at::Tensor parameter(std::int64_t count) {
  return at::full({count}, 1, at::kFloat).set_requires_grad(true);
}

class HookedGradientExchangeTest : public ::testing::Test {
 protected:
  comm::SoloCommunicator communicator_;
  std::vector<std::size_t> started_;

  // Two buckets, of two parameters and of one. The hook multiplies by 3 once it is waited for.
  HookedGradientExchange exchange_{communicator_,
                                   {{DType::kFloat32, 32, {{0, 4}, {16, 2}}}, {DType::kFloat32, 16, {{0, 5}}}},
                                   {{parameter(4), parameter(2)}, {parameter(5)}},
                                   [this](const ::c10d::GradBucket& bucket) {
                                     started_.push_back(bucket.getIndex());
                                     const at::Tensor memory = bucket.getBuffer();
                                     return [memory] { return memory.mul(3); };
                                   }};
};

float* floats(grad::GradientExchange& exchange, std::size_t bucket) {
  return static_cast<float*>(exchange.bucket(bucket).data);
}

TEST_F(HookedGradientExchangeTest, PutsWhatTheHookPromisesInThePlaceOfTheGradients) {
  for (const float value : {2.0f, 5.0f}) {
    floats(exchange_, 0)[17] = value;
    floats(exchange_, 1)[4] = value;
    exchange_.used_slots(0)[1] = 1;
    exchange_.publish(0);
    exchange_.publish(1);
    exchange_.finish(soon());
    EXPECT_EQ(floats(exchange_, 0)[17], 3 * value);
    EXPECT_EQ(floats(exchange_, 1)[4], 3 * value);
    EXPECT_FALSE(exchange_.used_anywhere(0, 0));
    EXPECT_TRUE(exchange_.used_anywhere(0, 1));
  }
}

TEST_F(HookedGradientExchangeTest, StartsTheHooksInOrderWhicheverBucketIsReadyFirst) {
  exchange_.publish(1);
  EXPECT_THAT(started_, ElementsAre());
  exchange_.publish(0);
  EXPECT_THAT(started_, ElementsAre(0, 1));
}

TEST_F(HookedGradientExchangeTest, BeginsAnewAfterARoundThatWasGivenUp) {
  exchange_.publish(0);
  exchange_.begin({}, soon());
  exchange_.publish(0);
  exchange_.publish(1);
  exchange_.finish(soon());
  EXPECT_THAT(started_, ElementsAre(0, 0, 1));
}

TEST_F(HookedGradientExchangeTest, RefusesWeights) {
  EXPECT_THROW(exchange_.begin({2.0, false}, soon()), InvalidArgument);
}

TEST(HookedGradientExchanges, ConformToGradientExchangeButForWeights) {
  testing::run_ranks(2, [](const testing::Communicator& communicator, int rank) {
    const auto averages = [&](const ::c10d::GradBucket& bucket) -> std::function<at::Tensor()> {
      const at::Tensor memory = bucket.getBuffer();
      return [communicator, memory] {
        communicator->all_reduce(view_of(memory), comm::ReduceOp::kAvg, soon());
        return memory;
      };
    };
    const auto doubles = [](std::int64_t count) { return parameter(count).to(at::kDouble); };
    HookedGradientExchange exchange(
        *communicator, comm::testing::conformance_buckets(),
        {{parameter(33), parameter(50)}, {doubles(1), doubles(60000), doubles(9992)}, {parameter(1)}}, averages);
    comm::testing::check_gradient_exchange(exchange, rank, 2, /*takes_weights=*/false);
  });
}

TEST(HookedGradientExchanges, RefuseAResultOfAnotherSize) {
  comm::SoloCommunicator communicator;
  HookedGradientExchange exchange(
      communicator, {{DType::kFloat32, 16, {{0, 4}}}}, {{parameter(4)}},
      [](const ::c10d::GradBucket&) { return [] { return at::full({3}, 1, at::kFloat); }; });
  exchange.publish(0);
  EXPECT_THROW(exchange.finish(soon()), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::grad
