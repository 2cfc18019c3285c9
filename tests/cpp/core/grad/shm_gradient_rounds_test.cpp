// Rounds of gradient buckets in which ranks have weights, or averages are measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/grad/gradient_exchanges.h"
#include "core/grad/make_gradient_exchange.h"

namespace accelerate_cpp::comm {

using namespace grad;
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
using testing::run_threads;

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
    const Exchange exchange = make_gradient_exchange(communicator, buckets, soon());
    for (int round = 0; round < 4; ++round) {
      exchange->begin({std::nullopt, true}, soon());
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
    const Exchange exchange = make_gradient_exchange(communicator, {{kFloat, 4096, {{0, 4096}}}}, soon());
    exchange->begin({std::nullopt, true}, soon());
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
    const Exchange exchange = make_gradient_exchange(communicator, buckets, soon());
    run_round(*exchange, 1, 1.0f);
    EXPECT_EQ(exchange->statistics(0, 0), std::nullopt);
    exchange->begin({std::nullopt, communicator.rank() == 0}, soon());
    run_round(*exchange, 1, 1.0f);
    EXPECT_EQ(exchange->statistics(0, 0), std::nullopt);
  });
}

TEST(GradientExchanges, GiveZeroWhereNoRankWeighsAnything) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, {{kFloat, 4, {{0, 4}}}}, soon());
    exchange->begin({0.0, false}, soon());
    run_round(*exchange, 1, 5.0f);
    EXPECT_EQ(*floats(*exchange, 0), 0.0f);
    EXPECT_EQ(exchange->divisor(), 0.0);
    run_round(*exchange, 1, 5.0f);
    EXPECT_EQ(*floats(*exchange, 0), 5.0f) << "the next one is as usual";
  });
}

TEST(GradientExchanges, RaiseOnEveryRankWhenOnlySomeGiveWeights) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, {{kFloat, 4, {{0, 4}}}}, soon());
    if (communicator.rank() == 0) {
      exchange->begin({2.0, false}, soon());
    }
    exchange->publish(0);
    EXPECT_THAT([&] { exchange->finish(soon()); }, ThrowsMessage<MismatchedCollective>(AllOf(
                                                       HasSubstr("rank 0: weighted"), HasSubstr("rank 1: gradient"))));
  });
}

// One round that rank 1 leaves by `leave(exchange)`, then two that all of them finish.
template <class Leave>
void leave_a_round_and_go_on(int size, const Leave& leave) {
  run_ranks(size, [&](Communicator& communicator) {
    const Exchange exchange =
        make_gradient_exchange(communicator, {{kFloat, 5000, {{0, 5000}}}, {kFloat, 3, {{0, 3}}}}, soon());
    run_round(*exchange, 2, 1.0f);
    for (int time = 0; time < 3; ++time) {
      exchange->begin({}, soon());
      if (communicator.rank() == 1) {
        leave(communicator, *exchange);
      } else {
        EXPECT_THAT([&] { run_round(*exchange, 2, -1.0f); }, ThrowsMessage<PeerWithdrew>(HasSubstr("out of memory")));
      }
      for (int round = 0; round < 2; ++round) {
        exchange->begin({std::nullopt, true}, soon());
        run_round(*exchange, 2, static_cast<float>(communicator.rank() + round));
        const float expected = static_cast<float>(size - 1) / 2 + static_cast<float>(round);
        EXPECT_EQ(floats(*exchange, 0)[4999], expected);
        EXPECT_EQ(floats(*exchange, 1)[2], expected);
        EXPECT_DOUBLE_EQ(exchange->statistics(1, 0).value().sum_of_squares, 3.0 * expected * expected);
      }
    }
  });
}

TEST(GradientExchangesThatAreInterrupted, GoOnAfterARankWithdrewBeforeItPublishedAnything) {
  leave_a_round_and_go_on(
      2, [](Communicator& communicator, GradientExchange&) { communicator.withdraw("out of memory", soon()); });
}

TEST(GradientExchangesThatAreInterrupted, GoOnAfterARankWithdrewWithOneBucketPublished) {
  leave_a_round_and_go_on(3, [](Communicator& communicator, GradientExchange& exchange) {
    std::fill_n(floats(exchange, 0), 5000, 7.0f);
    exchange.publish(0);
    exchange.progress();
    communicator.withdraw("out of memory", soon());
  });
}

TEST(GradientExchangesThatAreInterrupted, AgreeOnTheNextRoundThoughOneRankHadNotBegunTheLast) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, {{kFloat, 3, {{0, 3}}}}, soon());
    for (int time = 0; time < 3; ++time) {
      if (communicator.rank() == 1) {
        EXPECT_THROW(communicator.barrier(soon()), MismatchedCollective);
      } else {
        exchange->begin({}, soon());
        EXPECT_THROW(run_round(*exchange, 1, -1.0f), MismatchedCollective);
      }
      exchange->begin({}, soon());
      run_round(*exchange, 1, static_cast<float>(communicator.rank()));
      EXPECT_EQ(floats(*exchange, 0)[0], 0.5f);
    }
  });
}

TEST(GradientExchangesThatAreInterrupted, GoOnAfterAProbeEndedAWait) {
  struct Interrupted {};
  std::atomic<bool> interrupts{false};
  std::atomic<bool> interrupted{false};
  const auto hooks_of = [&](int rank) {
    WaitHooks hooks;
    hooks.probe = [&, rank] {
      if (rank == 1 && interrupts.exchange(false)) {
        throw Interrupted();
      }
    };
    return hooks;
  };
  run_threads(2, [&](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), hooks_of(rank));
    const Exchange exchange = make_gradient_exchange(*communicator, {{kFloat, 3, {{0, 3}}}}, soon());
    exchange->begin({}, soon());
    if (rank == 1) {
      interrupts = true;
      EXPECT_THROW(run_round(*exchange, 1, 1.0f), Interrupted);
      interrupted = true;
    } else {
      while (!interrupted) {
        std::this_thread::yield();
      }
      EXPECT_THROW(run_round(*exchange, 1, 1.0f), PeerWithdrew);
    }
    exchange->begin({}, soon());
    run_round(*exchange, 1, static_cast<float>(rank));
    EXPECT_EQ(floats(*exchange, 0)[0], 0.5f);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
