#include "core/grad/reduced_gradient_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "core/base/error.h"
#include "core/comm/communicator_conformance.h"
#include "core/grad/one_of_two.h"

namespace accelerate_cpp::comm::testing {

using namespace grad;
namespace {

using ::testing::ElementsAre;

// Rank 0 of two: the other rank's operands are twice what ours are, and its flags are all set.
class WithATwin : public OneOfTwo {
 public:
  std::vector<std::string> calls;
  bool fails = false;

  void all_reduce(MemoryView data, Reduction reduction, const Call&) override {
    if (fails) {
      throw PeerLost("rank 1 is gone");
    }
    calls.push_back(std::string(comm::name(reduction.op)) + " of " + std::to_string(data.count) + " " +
                    accelerate_cpp::name(data.dtype));
    for (std::size_t i = 0; i < data.count; ++i) {
      const double own = get(data, i);
      put(data, i, reduction.op == ReduceOp::kMax ? 1 : (own + 2 * own) / 2);
    }
  }
};

const std::vector<BucketSpec> kBuckets = {{DType::kFloat32, 2, std::vector<SlotSpan>(2)},
                                          {DType::kFloat64, 1, std::vector<SlotSpan>(1)},
                                          {DType::kFloat32, 0, std::vector<SlotSpan>(0)}};

void publish_all(GradientExchange& exchange) {
  for (const std::size_t index : {2, 0, 1}) {
    exchange.publish(index);
  }
}

TEST(ReducedGradientExchange, AveragesEveryBucketInOrderAndThenTheFlags) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  put(exchange.bucket(0), 0, 2);
  put(exchange.bucket(0), 1, 4);
  put(exchange.bucket(1), 0, 6);
  publish_all(exchange);
  exchange.progress();
  EXPECT_THAT(communicator.calls, ::testing::IsEmpty()) << "nothing moves before finish()";
  exchange.finish(soon());
  EXPECT_THAT(communicator.calls,
              ElementsAre("avg of 2 float32", "avg of 1 float64", "avg of 0 float32", "max of 3 uint8"));
  EXPECT_EQ(get(exchange.bucket(0), 0), 3);
  EXPECT_EQ(get(exchange.bucket(0), 1), 6);
  EXPECT_EQ(get(exchange.bucket(1), 0), 9);
}

TEST(ReducedGradientExchange, DividesByTheSumOfTheWeightsWhereRanksGiveThem) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  put(exchange.bucket(1), 0, 6);
  exchange.begin({3.0, false}, soon());
  publish_all(exchange);
  exchange.finish(soon());
  EXPECT_THAT(communicator.calls, ElementsAre("sum of 1 float64", "premul_sum of 2 float32", "premul_sum of 1 float64",
                                              "premul_sum of 0 float32", "max of 3 uint8"));
  EXPECT_EQ(exchange.statistics(0, 0), std::nullopt);
}

TEST(ReducedGradientExchange, ReducesABucketWhileOthersAreFilledWhereThereIsAQueue) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  const auto queue = std::make_shared<WorkQueue>();
  exchange.set_queue(queue);
  for (int round = 0; round < 2; ++round) {
    communicator.calls.clear();
    exchange.begin({}, soon());
    put(exchange.bucket(0), 0, 2);
    exchange.publish(1);
    queue->drain();
    EXPECT_THAT(communicator.calls, ::testing::IsEmpty()) << "bucket 0 goes first on all ranks";
    exchange.publish(0);
    queue->drain();
    EXPECT_THAT(communicator.calls, ElementsAre("avg of 2 float32", "avg of 1 float64"));
    EXPECT_EQ(get(exchange.bucket(0), 0), 3);
    exchange.publish(2);
    exchange.finish(soon());
    EXPECT_THAT(communicator.calls,
                ElementsAre("avg of 2 float32", "avg of 1 float64", "avg of 0 float32", "max of 3 uint8"));
  }
}

TEST(ReducedGradientExchange, RaisesInFinishWhatFailedMeanwhileAndCanBeginAnew) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  const auto queue = std::make_shared<WorkQueue>();
  exchange.set_queue(queue);
  communicator.fails = true;
  publish_all(exchange);
  EXPECT_THROW(exchange.finish(soon()), PeerLost);
  communicator.fails = false;
  exchange.begin({}, soon());
  publish_all(exchange);
  EXPECT_NO_THROW(exchange.finish(soon()));
}

TEST(ReducedGradientExchange, TellsUseOnAnyRankFromUseOnThisOne) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  publish_all(exchange);
  exchange.finish(soon());
  EXPECT_TRUE(exchange.used_anywhere(0, 1)) << "the twin uses everything";
  EXPECT_EQ(exchange.used_slots(0)[1], 0) << "what this rank wrote stays";
}

// Rank 0 of two with memory of its own kind: the host's is reduced apart.
class WithAnotherMemory final : public WithATwin {
 public:
  std::vector<std::uint8_t> seen;

  void all_reduce_on_host(MemoryView data, ReduceOp op, const Call&) override {
    EXPECT_EQ(op, ReduceOp::kMax);
    auto* const flags = static_cast<std::uint8_t*>(data.data);
    seen.assign(flags, flags + data.count);
    flags[2] = 1;
  }
};

TEST(ReducedGradientExchange, ReducesFlagsInTheMemoryOfTheHost) {
  WithAnotherMemory communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  exchange.used_slots(0)[1] = 1;
  publish_all(exchange);
  exchange.finish(soon());
  EXPECT_THAT(communicator.seen, ElementsAre(0, 1, 0));
  EXPECT_FALSE(exchange.used_anywhere(0, 0));
  EXPECT_TRUE(exchange.used_anywhere(0, 1));
  EXPECT_TRUE(exchange.used_anywhere(1, 0));
}

TEST(ReducedGradientExchange, KeepsBucketsInTheirPlaces) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  void* const before = exchange.bucket(1).data;
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(before) % 64, 0u);
  publish_all(exchange);
  exchange.finish(soon());
  EXPECT_EQ(exchange.bucket(1).data, before);
}

TEST(ReducedGradientExchange, WantsEveryBucketPublishedOncePerRound) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  exchange.publish(0);
  EXPECT_THROW(exchange.publish(0), InternalError);
  EXPECT_THROW(exchange.finish(soon()), InternalError);
  exchange.publish(1);
  exchange.publish(2);
  exchange.finish(soon());
  EXPECT_NO_THROW(exchange.publish(0)) << "the next round";
}

TEST(ReducedGradientExchange, KnowsItsBucketsAndSlots) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  EXPECT_THROW(exchange.bucket(3), InternalError);
  EXPECT_THROW(exchange.used_slots(3), InternalError);
  EXPECT_THROW(exchange.used_anywhere(1, 1), InternalError);
}

TEST(ReducedGradientExchange, PassesOnWhatTheCommunicatorRaises) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  publish_all(exchange);
  communicator.fails = true;
  EXPECT_THROW(exchange.finish(soon()), PeerLost);
}

TEST(ReducedGradientExchange, NeedsNoFlagsWhenThereAreNoSlots) {
  WithATwin communicator;
  ReducedGradientExchange exchange(communicator, {{DType::kFloat32, 1, std::vector<SlotSpan>(0)}});
  exchange.publish(0);
  exchange.finish(soon());
  EXPECT_THAT(communicator.calls, ElementsAre("avg of 1 float32"));
}

TEST(ReducedGradientExchange, IsTheIdentityForOneRank) {
  SoloCommunicator communicator;
  ReducedGradientExchange exchange(communicator, kBuckets);
  put(exchange.bucket(0), 0, 2.5);
  exchange.used_slots(1)[0] = 1;
  publish_all(exchange);
  exchange.finish(soon());
  EXPECT_EQ(get(exchange.bucket(0), 0), 2.5);
  EXPECT_FALSE(exchange.used_anywhere(0, 0));
  EXPECT_TRUE(exchange.used_anywhere(1, 0));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
