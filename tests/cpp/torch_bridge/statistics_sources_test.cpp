#include "torch_bridge/statistics_sources.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include "torch_bridge/reducers_of_threads.h"

namespace accelerate_cpp::grad {
namespace {

using testing::Communicator;
using testing::reducer_of;
using testing::run_ranks;

at::Tensor parameter() {
  return at::full({100}, 1, at::kFloat).set_requires_grad(true);
}

TEST(StatisticsSources, AnswerOnceTheyHaveBeenAsked) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    const at::Tensor tensor = parameter();
    const at::Tensor stranger = parameter();
    const auto reducer = reducer_of(communicator, {tensor});
    const auto pass = [&] {
      tensor.mutable_grad().reset();
      tensor.mul(rank + 1).sum().backward();
    };
    pass();
    EXPECT_FALSE(known_statistics({tensor})[0]);
    pass();
    const auto known = known_statistics({stranger, tensor});
    EXPECT_FALSE(known[0]);
    ASSERT_TRUE(known[1]);
    EXPECT_EQ(known[1]->sum_of_squares, 100 * 1.5 * 1.5);
    tensor.grad().mul_(2);
    EXPECT_FALSE(known_statistics({tensor})[0]);
  });
}

TEST(StatisticsSources, AreAskedUntilOneKnowsAndForgottenWhenTheyEnd) {
  struct Source final : StatisticsSource {
    explicit Source(std::optional<double> answer_) : answer(answer_) {}
    ~Source() override { forget_source(); }
    std::optional<amp::GradientStatistics> statistics(const at::Tensor&) override {
      ++questions;
      return answer ? std::optional(amp::GradientStatistics{*answer, 0}) : std::nullopt;
    }
    std::optional<double> answer;
    int questions = 0;
  };
  Source ignorant(std::nullopt);
  {
    Source first(1.0);
    Source second(2.0);
    EXPECT_EQ(known_statistics({parameter()})[0]->sum_of_squares, 1.0);
    EXPECT_EQ(ignorant.questions, 1);
    EXPECT_EQ(second.questions, 0);
  }
  EXPECT_FALSE(known_statistics({parameter()})[0]);
}

}  // namespace
}  // namespace accelerate_cpp::grad
