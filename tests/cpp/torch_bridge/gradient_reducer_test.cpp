#include "torch_bridge/gradient_reducer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/solo.h"
#include "torch_bridge/gradient_reducers.h"
#include "torch_bridge/reducers_of_threads.h"

namespace accelerate_cpp::grad {
namespace {

using comm::Communicator;
using comm::testing::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kOptions;
using testing::reducer_of;
using testing::run_ranks;

at::Tensor parameter(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::full({count}, 2, dtype).set_requires_grad(true);
}

std::shared_ptr<Communicator> alone() {
  return std::make_shared<comm::SoloCommunicator>();
}

// A backward pass that gives every parameter p the gradient scale * 1.
void backward(const std::vector<at::Tensor>& parameters, double scale) {
  std::vector<at::Tensor> sums;
  for (const at::Tensor& tensor : parameters) {
    sums.push_back(tensor.to(at::kDouble).sum().mul(scale).reshape({1}));
  }
  at::cat(sums).sum().backward();
}

void expect_filled(const at::Tensor& found, double value) {
  ASSERT_TRUE(found.defined());
  EXPECT_TRUE(at::equal(found, at::full_like(found, value)))
      << "starts with " << found.flatten()[0].item<double>() << ", expected " << value;
}

class ReducerOfSize : public ::testing::TestWithParam<int> {};

TEST_P(ReducerOfSize, AveragesTheGradientsOfEveryDtypeOverAllRanks) {
  const int size = GetParam();
  run_ranks(size, [size](std::shared_ptr<Communicator> communicator, int rank) {
    const std::vector<at::Tensor> parameters = {parameter(5), parameter(300000), parameter(7, at::kDouble),
                                                parameter(3, at::kBFloat16), parameter(9, at::kHalf)};
    const auto reducer = reducer_of(std::move(communicator), parameters);
    for (int round = 1; round <= 3; ++round) {
      backward(parameters, 2 * rank * round);
      for (const at::Tensor& tensor : parameters) {
        expect_filled(tensor.grad(), (size - 1) * round);
        tensor.mutable_grad().reset();
      }
    }
  });
}

TEST_P(ReducerOfSize, AddsUpSynchronisedBackwardPasses) {
  const int size = GetParam();
  run_ranks(size, [size](std::shared_ptr<Communicator> communicator, int rank) {
    const std::vector<at::Tensor> parameters = {parameter(5), parameter(17)};
    const auto reducer = reducer_of(std::move(communicator), parameters);
    for (int round = 1; round <= 4; ++round) {
      backward(parameters, 2 * rank);
      expect_filled(parameters[0].grad(), (size - 1) * round);
      expect_filled(parameters[1].grad(), (size - 1) * round);
    }
  });
}

TEST_P(ReducerOfSize, AddsLocalPassesToTheNextSynchronisedOne) {
  const int size = GetParam();
  run_ranks(size, [size](std::shared_ptr<Communicator> communicator, int rank) {
    const std::vector<at::Tensor> parameters = {parameter(5)};
    const auto reducer = reducer_of(std::move(communicator), parameters);
    reducer->set_synchronizing(false);
    EXPECT_FALSE(reducer->synchronizing());
    backward(parameters, 2 * rank);
    expect_filled(parameters[0].grad(), 2 * rank);
    reducer->set_synchronizing(true);
    backward(parameters, 4 * rank);
    expect_filled(parameters[0].grad(), 3 * (size - 1));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReducerOfSize, ::testing::Values(1, 2, 3));

TEST(GradientReducer, LeavesAParameterThatNoRankUsedWithoutGradient) {
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    const at::Tensor used = parameter(5);
    const at::Tensor on_rank_0 = parameter(6);
    const at::Tensor unused = parameter(7);
    const auto reducer = reducer_of(std::move(communicator), {used, on_rank_0, unused});
    for (int round = 1; round <= 2; ++round) {
      backward(rank == 0 ? std::vector<at::Tensor>{used, on_rank_0} : std::vector<at::Tensor>{used}, 4);
      expect_filled(used.grad(), 4 * round);
      expect_filled(on_rank_0.grad(), 2 * round);
      EXPECT_FALSE(unused.grad().defined());
    }
  });
}

TEST(GradientReducer, KeepsTheMemoryOfAGradientOverRoundsUnlessItIsReplaced) {
  const std::vector<at::Tensor> parameters = {parameter(5), parameter(6)};
  const auto reducer = reducer_of(alone(), parameters);
  backward(parameters, 1);
  const void* const place = parameters[0].grad().data_ptr();
  backward(parameters, 1);
  EXPECT_EQ(parameters[0].grad().data_ptr(), place);
  parameters[0].mutable_grad() = at::full({5}, 10, at::kFloat);
  backward(parameters, 1);
  EXPECT_EQ(parameters[0].grad().data_ptr(), place);
  expect_filled(parameters[0].grad(), 11);
  expect_filled(parameters[1].grad(), 3);
}

TEST(GradientReducer, GivesAGradientTheStridesOfItsParameter) {
  const at::Tensor image =
      at::full({2, 3, 4, 4}, 1, at::kFloat).contiguous(at::MemoryFormat::ChannelsLast).set_requires_grad(true);
  const at::Tensor expanded = at::full({3, 1}, 1, at::kFloat).expand({3, 4}).detach().set_requires_grad(true);
  const auto reducer = reducer_of(alone(), {image, expanded});
  backward({image, expanded}, 3);
  EXPECT_EQ(image.grad().strides(), image.strides());
  EXPECT_TRUE(expanded.grad().is_contiguous());
  expect_filled(image.grad(), 3);
  expect_filled(expanded.grad(), 3);
}

// Registered first and used last in backward: the reverse of what is assumed before the first pass.
TEST(GradientReducer, PlansItsBucketsAnewInTheOrderInWhichRankZeroSawGradientsArrive) {
  static constexpr std::size_t kSmall = 64;
  static constexpr std::size_t kLarge = 4096;
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    const at::Tensor small = parameter(kSmall / 4);
    const at::Tensor large = parameter(kLarge / 4);
    const auto reducer = reducer_of(std::move(communicator), {small, large}, {kSmall, kLarge, kOptions.timeout});
    ASSERT_THAT(reducer->bucket_sizes_bytes(), ElementsAre(kLarge, kSmall));
    for (int round = 1; round <= 3; ++round) {
      // Autograd runs the nodes that were made last first; the two ranks see opposite orders.
      const at::Tensor& first = rank == 0 ? large : small;
      const at::Tensor& second = rank == 0 ? small : large;
      const at::Tensor loss = first.sum().mul(2 * rank);
      second.sum().mul(2 * rank).add(loss).backward();
      const auto planned = round == 1 ? ElementsAre(kLarge, kSmall) : ElementsAre(kSmall, kLarge);
      EXPECT_THAT(reducer->bucket_sizes_bytes(), planned);
      expect_filled(small.grad(), round);
      expect_filled(large.grad(), round);
    }
  });
}

TEST(GradientReducer, LeavesGradientsUsableAndParametersFreeWhenItEnds) {
  const std::vector<at::Tensor> parameters = {parameter(5)};
  auto reducer = reducer_of(alone(), parameters);
  backward(parameters, 3);
  reducer.reset();
  expect_filled(parameters[0].grad(), 3);
  backward(parameters, 4);
  expect_filled(parameters[0].grad(), 7);
}

TEST(GradientReducer, MayEndBetweenForwardAndBackward) {
  const at::Tensor tensor = parameter(5);
  auto reducer = reducer_of(alone(), {tensor});
  const at::Tensor loss = tensor.mul(2).sum();
  reducer.reset();
  loss.backward();
  expect_filled(tensor.grad(), 2);
}

TEST(GradientReducer, HandsErrorsToItsTranslatorWhileTheyAreInFlight) {
  std::string seen;
  const at::Tensor tensor = parameter(5);
  const auto communicator = alone();
  const auto reducer = GradientReducer::create(communicator, {{"weight", tensor}}, {}, kOptions, [&seen] {
    try {
      throw;
    } catch (const InvalidArgument& error) {
      seen = error.what();
      throw;
    }
  });
  const at::Tensor grad = parameter(5).mul(2);
  tensor.mutable_grad() = grad;
  EXPECT_ANY_THROW(backward({tensor}, 1));
  EXPECT_THAT(seen, HasSubstr("backward(create_graph=True)"));
}

TEST(GradientReducer, MakesItsFailureKnownToTheOtherRanks) {
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    const at::Tensor tensor = parameter(5);
    const auto reducer = reducer_of(communicator, {tensor});
    for (int time = 0; time < 3; ++time) {
      if (rank == 0) {
        EXPECT_THAT(message_of<PeerLost>([&] { backward({tensor}, 1); }),
                    HasSubstr("its backward pass ended in an exception"));
      } else {
        tensor.mutable_grad() = parameter(5).mul(2);  // has a graph
        EXPECT_THROW(backward({tensor}, 1), InvalidArgument);
      }
      EXPECT_FALSE(tensor.grad().defined());
      backward({tensor}, rank + 1.0);
      expect_filled(tensor.grad(), 1.5);
      tensor.mutable_grad().reset();
    }
  });
}

TEST(GradientReducer, LeavesItToItsCallerToSayHowAPassEnds) {
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    const at::Tensor tensor = parameter(5);
    const auto reducer = reducer_of(communicator, {tensor});
    for (int time = 0; time < 3; ++time) {
      reducer->expect_backward();
      backward({tensor}, rank + 1.0);
      if (rank == 0) {
        EXPECT_THAT(message_of<PeerLost>([&] { reducer->backward_ended(); }), HasSubstr("out of memory"));
      }
      reducer->backward_failed("out of memory");
      EXPECT_FALSE(tensor.grad().defined());
      reducer->expect_backward();
      backward({tensor}, rank + 1.0);
      reducer->backward_ended();
      expect_filled(tensor.grad(), 1.5);
      backward({tensor}, rank + 1.0);
      expect_filled(tensor.grad(), 3.0);
      tensor.mutable_grad().reset();
    }
  });
}

TEST(GradientReducer, AveragesAParameterWheneverItRequiresAGradient) {
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    const at::Tensor frozen = parameter(5).requires_grad_(false);
    const at::Tensor trained = parameter(5);
    const auto reducer = reducer_of(communicator, {frozen, trained});
    EXPECT_FALSE(frozen.requires_grad());
    backward({trained}, rank + 1.0);
    EXPECT_FALSE(frozen.grad().defined());
    frozen.requires_grad_(true);
    backward({frozen, trained}, rank + 1.0);
    expect_filled(frozen.grad(), 1.5);
    expect_filled(trained.grad(), 3.0);
  });
}

TEST(GradientReducer, KnowsWhenItMayLackParameters) {
  const at::Tensor left_out = parameter(5).requires_grad_(false);
  const auto reducer =
      GradientReducer::create(alone(), {{"weight", parameter(5)}}, {left_out}, kOptions, [] { throw; });
  EXPECT_FALSE(reducer->may_lack_parameters());
  note_registration();
  EXPECT_TRUE(reducer->may_lack_parameters());
  EXPECT_FALSE(reducer->may_lack_parameters()) << "the caller has looked";
  left_out.requires_grad_(true);
  EXPECT_TRUE(reducer->may_lack_parameters());
  EXPECT_TRUE(reducer->may_lack_parameters());
}

TEST(GradientReducer, RefusesModelsThatItCannotTrain) {
  EXPECT_THAT(message_of<InvalidArgument>([] { reducer_of(alone(), {}); }),
              HasSubstr("the model has no parameter that requires a gradient"));
  const auto refusal = [](const at::Tensor& tensor) {
    return message_of<InvalidArgument>([&] { reducer_of(alone(), {tensor}); });
  };
  EXPECT_THAT(refusal(parameter(5).mul(2)), HasSubstr("parameter p0: expected a dense leaf on cpu"));
  const auto meta = at::TensorOptions().dtype(at::kFloat).device(at::kMeta);
  EXPECT_THAT(refusal(at::full({5}, 1, meta).set_requires_grad(true)), HasSubstr("found a tensor on meta"));
  EXPECT_THAT(refusal(at::full({5}, 1, at::kUInt16)), HasSubstr("UInt16"));
}

TEST(GradientReducer, RefusesDifferentModelsOnEveryRank) {
  run_ranks(2, [](std::shared_ptr<Communicator> communicator, int rank) {
    EXPECT_THAT(message_of<MismatchedCollective>([&] { reducer_of(communicator, {parameter(100 + 100 * rank)}); }),
                HasSubstr("every rank must build the same model"));
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
