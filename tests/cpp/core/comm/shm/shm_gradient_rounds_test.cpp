// Rounds of gradient buckets in which ranks have weights, or averages are measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/comm/shm/gradient_exchanges.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::soon;
using ::testing::ThrowsMessage;

using testing::Buckets;
using testing::Exchange;
using testing::floats;
using testing::kFloat;
using testing::run_ranks;

// A round in which every element of every bucket (of floats) is `value`.
void run_round(GradientExchange& exchange, std::size_t num_buckets, float value) {
  for (std::size_t b = 0; b < num_buckets; ++b) {
    std::fill_n(floats(exchange, b), exchange.bucket(b).count, value);
    exchange.publish(b);
  }
  exchange.finish(soon());
}

// The statistics of the slots of `exchange`, whose buckets are `buckets`; none where one is unknown.
std::vector<std::optional<double>> squares_of(const GradientExchange& exchange, const Buckets& buckets) {
  std::vector<std::optional<double>> squares;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t slot = 0; slot < buckets[b].slots.size(); ++slot) {
      const auto statistics = exchange.statistics(b, slot);
      squares.push_back(statistics ? std::optional(statistics->sum_of_squares) : std::nullopt);
    }
  }
  return squares;
}

TEST(GradientExchanges, MeasureEachSlotWithoutWhatLiesBetweenSlots) {
  const Buckets buckets = {{kFloat, 5000, {{0, 3}, {16, 4984}}}, {DType::kBFloat16, 64, {{0, 1}, {32, 32}}}};
  run_ranks(3, [&](Communicator& communicator) {
    const Exchange exchange = communicator.gradient_exchange(buckets, soon());
    for (int round = 0; round < 4; ++round) {
      exchange->begin({std::nullopt, true});
      std::fill_n(floats(*exchange, 0), 5000, static_cast<float>(communicator.rank()));
      floats(*exchange, 0)[7] = NAN;  // between the slots
      std::fill_n(static_cast<BFloat16*>(exchange->bucket(1).data), 64, to_bfloat16(2.0f));
      exchange->publish(0);
      exchange->publish(1);
      exchange->finish(soon());
      EXPECT_THAT(squares_of(*exchange, buckets), ::testing::ElementsAre(3.0, 4984.0, 4.0, 128.0)) << "round " << round;
    }
  });
}

TEST(GradientExchanges, CountWhatIsNotFiniteOnAnyRankOnAllOfThem) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = communicator.gradient_exchange({{kFloat, 4096, {{0, 4096}}}}, soon());
    exchange->begin({std::nullopt, true});
    std::fill_n(floats(*exchange, 0), 4096, 1.0f);
    if (communicator.rank() == 1) {
      floats(*exchange, 0)[5] = INFINITY;
      floats(*exchange, 0)[4000] = NAN;
    }
    exchange->publish(0);
    exchange->finish(soon());
    EXPECT_EQ(exchange->statistics(0, 0)->num_non_finite, 2u);
  });
}

TEST(GradientExchanges, KnowNoStatisticsUnlessAllRanksWantThem) {
  run_ranks(2, [](Communicator& communicator) {
    const Buckets buckets = {{kFloat, 4, {{0, 4}}}};
    const Exchange exchange = communicator.gradient_exchange(buckets, soon());
    run_round(*exchange, 1, 1.0f);
    EXPECT_EQ(exchange->statistics(0, 0), std::nullopt);
    exchange->begin({std::nullopt, communicator.rank() == 0});
    run_round(*exchange, 1, 1.0f);
    EXPECT_EQ(exchange->statistics(0, 0), std::nullopt);
  });
}

TEST(GradientExchanges, GiveZeroWhereNoRankWeighsAnything) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = communicator.gradient_exchange({{kFloat, 4, {{0, 4}}}}, soon());
    exchange->begin({0.0, false});
    run_round(*exchange, 1, 5.0f);
    EXPECT_EQ(*floats(*exchange, 0), 0.0f);
    EXPECT_EQ(exchange->divisor(), 0.0);
    run_round(*exchange, 1, 5.0f);
    EXPECT_EQ(*floats(*exchange, 0), 5.0f) << "the next one is as usual";
  });
}

TEST(GradientExchanges, RaiseOnEveryRankWhenOnlySomeGiveWeights) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = communicator.gradient_exchange({{kFloat, 4, {{0, 4}}}}, soon());
    if (communicator.rank() == 0) {
      exchange->begin({2.0, false});
    }
    exchange->publish(0);
    EXPECT_THAT([&] { exchange->finish(soon()); }, ThrowsMessage<MismatchedCollective>(AllOf(
                                                       HasSubstr("rank 0: weighted"), HasSubstr("rank 1: gradient"))));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
