#include "core/grad/shm_gradient_exchange.h"
#include "core/grad/make_gradient_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "core/base/half.h"
#include "core/grad/gradient_exchanges.h"

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

// Buckets of one slot each; all are float32 unless a test says otherwise.
Buckets of(const std::vector<std::size_t>& counts) {
  Buckets buckets;
  for (const std::size_t count : counts) {
    buckets.push_back({kFloat, count, {{0, count}}});
  }
  return buckets;
}

void fill(GradientExchange& exchange, std::size_t bucket, float value) {
  std::fill_n(floats(exchange, bucket), exchange.bucket(bucket).count, value);
}

bool is_all(GradientExchange& exchange, std::size_t bucket, float value) {
  const float* const begin = floats(exchange, bucket);
  return std::all_of(begin, begin + exchange.bucket(bucket).count, [value](float element) { return element == value; });
}

// One round in which every bucket (float32) of rank r holds first + r + its number.
void run_round(GradientExchange& exchange, std::size_t num_buckets, int rank, int size, float first) {
  for (std::size_t b = 0; b < num_buckets; ++b) {
    fill(exchange, b, first + static_cast<float>(rank) + static_cast<float>(b));
    exchange.publish(b);
    exchange.progress();
  }
  exchange.finish(soon());
  for (std::size_t b = 0; b < num_buckets; ++b) {
    EXPECT_TRUE(is_all(exchange, b, first + static_cast<float>(size - 1) / 2 + static_cast<float>(b)))
        << "bucket " << b << " on rank " << rank;
  }
}

// Long enough for any machine, short enough that a rank that hears nothing fails the test in a while.
Deadline in_a_while() {
  return Deadline::after(std::chrono::seconds(30));
}

// Mappings of shared segments in this process.
int count_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:accelerate_cpp") != std::string::npos ? 1 : 0;
  }
  return count;
}

// The element that `rank` has at `index`: any bits over several magnitudes.
float gradient(int rank, std::size_t index) {
  const auto mixed = static_cast<std::uint32_t>((index * 64 + static_cast<std::size_t>(rank) + 1) * 2654435761u);
  return std::ldexp(static_cast<float>(mixed), -30 - static_cast<int>(mixed % 12)) - 1.0f;
}

TEST(GradientExchanges, AverageInRankOrderToTheLastBit) {
  run_ranks(4, [](Communicator& communicator) {
    for (const std::size_t count : {1u, 15u, 16u, 17u, 64u, 1023u, 4099u}) {
      const Exchange exchange = make_gradient_exchange(
          communicator,
          {{kFloat, count, std::vector<SlotSpan>(1)}, {DType::kBFloat16, count, std::vector<SlotSpan>(1)}}, soon());
      auto* const brains = static_cast<BFloat16*>(exchange->bucket(1).data);
      for (std::size_t i = 0; i < count; ++i) {
        floats(*exchange, 0)[i] = gradient(communicator.rank(), i);
        brains[i] = to_bfloat16(gradient(communicator.rank(), i));
      }
      exchange->publish(1);
      exchange->publish(0);
      exchange->finish(soon());
      for (std::size_t i = 0; i < count; ++i) {
        float sum = gradient(0, i);
        float rounded_sum = to_float(to_bfloat16(gradient(0, i)));
        for (int rank = 1; rank < 4; ++rank) {
          sum += gradient(rank, i);
          rounded_sum += to_float(to_bfloat16(gradient(rank, i)));
        }
        ASSERT_EQ(bits_of(floats(*exchange, 0)[i]), bits_of(sum * 0.25f)) << "element " << i << " of " << count;
        ASSERT_EQ(brains[i].bits, to_bfloat16(rounded_sum * 0.25f).bits) << "element " << i << " of " << count;
      }
    }
  });
}

TEST(GradientExchanges, LeaveABucketAloneUntilEveryRankHasPublishedIt) {
  std::atomic<bool> looked{false};
  run_ranks(2, [&](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, of({1000, 1000}), soon());
    fill(*exchange, 0, static_cast<float>(communicator.rank()));
    fill(*exchange, 1, static_cast<float>(communicator.rank()));
    if (communicator.rank() == 0) {
      exchange->publish(0);
      exchange->progress();
      EXPECT_TRUE(is_all(*exchange, 0, 0.0f));
      looked = true;
      exchange->publish(1);
    } else {
      exchange->publish(1);
      while (!looked) {
        std::this_thread::yield();
      }
      exchange->progress();
      exchange->publish(0);
    }
    exchange->finish(soon());
    EXPECT_TRUE(is_all(*exchange, 0, 0.5f));
    EXPECT_TRUE(is_all(*exchange, 1, 0.5f));
  });
}

TEST(GradientExchanges, TellInEachRoundWhichSlotsAnyRankUsed) {
  run_ranks(3, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(
        communicator, {{kFloat, 8, std::vector<SlotSpan>(4)}, {kFloat, 8, std::vector<SlotSpan>(1)}}, soon());
    for (int round = 0; round < 12; ++round) {
      for (std::size_t b = 0; b < 2; ++b) {
        for (int slot = 0; slot < (b == 0 ? 4 : 1); ++slot) {
          exchange->used_slots(b)[slot] = communicator.rank() == round % 3 && slot == round % 4 ? 1 : 0;
        }
        exchange->publish(b);
      }
      exchange->finish(soon());
      for (std::size_t slot = 0; slot < 4; ++slot) {
        EXPECT_EQ(exchange->used_anywhere(0, slot), slot == static_cast<std::size_t>(round % 4)) << "round " << round;
      }
      EXPECT_EQ(exchange->used_anywhere(1, 0), round % 4 == 0) << "round " << round;
    }
  });
}

TEST(GradientExchanges, MayHaveNoBucketsOrEmptyOnes) {
  run_ranks(3, [](Communicator& communicator) {
    const Exchange none = make_gradient_exchange(communicator, {}, soon());
    const Exchange empty = make_gradient_exchange(
        communicator, {{kFloat, 0, std::vector<SlotSpan>(0)}, {kFloat, 1, std::vector<SlotSpan>(1)}}, soon());
    for (int round = 0; round < 3; ++round) {
      none->progress();
      none->finish(soon());
      run_round(*empty, 2, communicator.rank(), 3, 1.0f);
    }
  });
}

TEST(GradientExchanges, OfOneGroupDoNotDisturbEachOtherNorOtherOperations) {
  run_ranks(3, [](Communicator& communicator) {
    const int rank = communicator.rank();
    const Exchange first = make_gradient_exchange(communicator, of({5000}), soon());
    const Exchange second = make_gradient_exchange(communicator, of({70, 30000}), soon());
    const void* const place = first->bucket(0).data;
    for (int round = 0; round < 5; ++round) {
      run_round(*first, 1, rank, 3, static_cast<float>(round));
      EXPECT_EQ(first->bucket(0).data, place) << "buckets stay where they are";
      fill(*first, 0, static_cast<float>(rank));
      first->publish(0);
      run_round(*second, 2, rank, 3, static_cast<float>(10 * round));
      std::vector<float> sum(40000, static_cast<float>(rank));
      communicator.all_reduce({sum.data(), sum.size(), kFloat}, ReduceOp::kSum, soon());
      EXPECT_EQ(sum, std::vector<float>(40000, 3.0f));
      first->finish(soon());
      EXPECT_TRUE(is_all(*first, 0, 1.0f));
    }
  });
}

TEST(GradientExchanges, CanBeMadeAgainAfterARound) {
  run_ranks(3, [](Communicator& communicator) {
    for (std::size_t generation = 0; generation < 50; ++generation) {
      const Exchange exchange = make_gradient_exchange(communicator, of({100 + 37 * generation}), in_a_while());
      run_round(*exchange, 1, communicator.rank(), 3, static_cast<float>(generation));
    }
  });
}

TEST(GradientExchanges, CanBeDestroyedAsSoonAsTheyHaveBeenMade) {
  run_ranks(4, [](Communicator& communicator) {
    for (int generation = 0; generation < 100; ++generation) {
      make_gradient_exchange(communicator, of({100}), in_a_while());
    }
    communicator.barrier(soon());
  });
}

// Lets two ranks use exchanges as `use` does, then make one more, with which they learn what their peer has released.
// How many segments are mapped then beyond those of the group and the two of the last exchange.
template <class Use>
int mappings_left_behind(const Use& use) {
  std::atomic<int> left{0};
  run_ranks(2, [&](Communicator& communicator) {
    communicator.barrier(soon());
    const int before = count_mappings();
    communicator.barrier(soon());
    use(communicator);
    // Ranks look for what the others have released, and let go of, every 64 operations.
    for (int operation = 0; operation < 4 * 64; ++operation) {
      communicator.barrier(soon());
    }
    const Exchange last = make_gradient_exchange(communicator, of({100}), soon());
    run_round(*last, 1, communicator.rank(), 2, 0.0f);
    left = count_mappings() - before - 2;
    communicator.barrier(soon());
  });
  return left;
}

TEST(GradientExchanges, GiveTheirMemoryBack) {
  EXPECT_EQ(mappings_left_behind([](Communicator& communicator) {
              for (int generation = 0; generation < 5; ++generation) {
                const Exchange exchange = make_gradient_exchange(communicator, of({100}), soon());
                run_round(*exchange, 1, communicator.rank(), 2, 0.0f);
              }
            }),
            0);
}

TEST(GradientExchanges, ThatWereRefusedLeaveNoMemoryBehind) {
  EXPECT_EQ(mappings_left_behind([](Communicator& communicator) {
              for (std::size_t i = 1; i <= 5; ++i) {
                const std::size_t count = 100 * i + static_cast<std::size_t>(communicator.rank());
                EXPECT_THROW(make_gradient_exchange(communicator, of({count}), in_a_while()), MismatchedCollective);
              }
            }),
            0);
}

class LayoutMismatch : public ::testing::TestWithParam<Buckets> {};

TEST_P(LayoutMismatch, IsRaisedOnAllRanksAndLeavesTheGroupUsable) {
  const Buckets usual = {{kFloat, 100, std::vector<SlotSpan>(2)}, {kFloat, 50, std::vector<SlotSpan>(1)}};
  for (int odd = 0; odd < 3; ++odd) {
    run_ranks(3, [&](Communicator& communicator) {
      const Buckets& buckets = communicator.rank() == odd ? GetParam() : usual;
      EXPECT_THAT([&] { make_gradient_exchange(communicator, buckets, in_a_while()); },
                  ThrowsMessage<MismatchedCollective>(HasSubstr("different parameters")));
      const Exchange exchange = make_gradient_exchange(communicator, usual, in_a_while());
      run_round(*exchange, 2, communicator.rank(), 3, 1.0f);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, LayoutMismatch,
    ::testing::Values(Buckets{{kFloat, 100, std::vector<SlotSpan>(2)}, {DType::kInt32, 50, std::vector<SlotSpan>(1)}},
                      Buckets{{kFloat, 100, std::vector<SlotSpan>(2)}, {kFloat, 51, std::vector<SlotSpan>(1)}},
                      Buckets{{kFloat, 100, std::vector<SlotSpan>(2)}, {kFloat, 50, std::vector<SlotSpan>(2)}},
                      Buckets{{kFloat, 50, std::vector<SlotSpan>(1)}, {kFloat, 100, std::vector<SlotSpan>(2)}},
                      Buckets{{kFloat, 100, std::vector<SlotSpan>(2)}}, Buckets{}));

TEST(GradientExchanges, TakeItForAFaultToPublishABucketTwiceInARound) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, of({4}), soon());
    for (int round = 0; round < 3; ++round) {
      fill(*exchange, 0, static_cast<float>(communicator.rank()));
      exchange->publish(0);
      EXPECT_THAT([&] { exchange->publish(0); }, ThrowsMessage<InternalError>(HasSubstr("once per round")));
      exchange->finish(soon());
      EXPECT_TRUE(is_all(*exchange, 0, 0.5f));
    }
  });
}

TEST(GradientExchanges, TakeItForAFaultToNameABucketOrSlotThatIsNotThere) {
  run_ranks(1, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, {{kFloat, 4, std::vector<SlotSpan>(2)}}, soon());
    EXPECT_THROW(exchange->publish(1), InternalError);
    EXPECT_THROW(exchange->used_slots(1), InternalError);
    EXPECT_THROW(exchange->used_anywhere(1, 0), InternalError);
    EXPECT_THROW(exchange->used_anywhere(0, 2), InternalError);
    EXPECT_THROW(exchange->statistics(0, 2), InternalError);
  });
}

TEST(GradientExchanges, TakeItForAFaultToFinishBeforeEveryBucketIsPublished) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, of({9, 9}), soon());
    exchange->publish(1);
    EXPECT_THAT([&] { exchange->finish(soon()); }, ThrowsMessage<InternalError>(HasSubstr("bucket 0")));
    exchange->publish(0);
    exchange->finish(soon());
  });
}

TEST(GradientExchanges, RaiseOnEveryRankWhenOneFinishesWhileAnotherIsElsewhere) {
  run_ranks(3, [](Communicator& communicator) {
    const Exchange exchange = make_gradient_exchange(communicator, of({1000}), soon());
    fill(*exchange, 0, static_cast<float>(communicator.rank()));
    exchange->publish(0);
    EXPECT_THAT([&] { communicator.rank() == 1 ? communicator.barrier(soon()) : exchange->finish(soon()); },
                ThrowsMessage<MismatchedCollective>(
                    AllOf(HasSubstr("rank 0: gradient averaging of 1 buckets"), HasSubstr("rank 1: barrier"))));
    exchange->finish(soon());
    EXPECT_TRUE(is_all(*exchange, 0, 1.0f)) << "and the round can still be finished";
  });
}

TEST(GradientExchanges, RaiseOnEveryRankWhenRanksFinishDifferentOnes) {
  run_ranks(2, [](Communicator& communicator) {
    const Exchange first = make_gradient_exchange(communicator, of({10}), soon());
    const Exchange second = make_gradient_exchange(communicator, of({10}), soon());
    first->publish(0);
    second->publish(0);
    EXPECT_THROW((communicator.rank() == 0 ? first : second)->finish(soon()), MismatchedCollective);
    first->finish(soon());
    second->finish(soon());
  });
}

// Runs three ranks as processes, of which rank 1 is expected to be killed.
void expect_that_one_is_killed(const testing::RankBody& body) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(testing::start_process(folder, rank, body));
  }
  EXPECT_EQ(testing::wait_process(ranks[0]), 0);
  EXPECT_EQ(testing::wait_process(ranks[1]), -SIGKILL);
  EXPECT_EQ(testing::wait_process(ranks[2]), 0);
  std::filesystem::remove_all(folder);
}

void expect_lost_rank_one(GradientExchange& exchange) {
  EXPECT_THAT([&] { exchange.finish(soon()); },
              ThrowsMessage<PeerLost>(AllOf(HasSubstr("gradient averaging"), HasSubstr("rank 1"))));
}

TEST(GradientExchanges, NameARankThatIsKilledBeforeItFinishes) {
  expect_that_one_is_killed([](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 3, soon(), {});
    const Exchange exchange = make_gradient_exchange(*communicator, of({9, 9}), soon());
    run_round(*exchange, 2, rank, 3, 1.0f);
    exchange->publish(0);
    if (rank == 1) {
      ::raise(SIGKILL);
    }
    exchange->publish(1);
    expect_lost_rank_one(*exchange);
  });
}

TEST(GradientExchanges, NameARankThatIsKilledWhileItFinishes) {
  expect_that_one_is_killed([](Store& store, int rank) {
    bool armed = false;
    const auto die = [&] {  // called while rank 1 waits, inside finish(), for rank 2
      if (armed) {
        store.set("dying", "");
        ::raise(SIGKILL);
      }
    };
    const auto communicator = ShmCommunicator::connect(store, rank, 3, soon(), WaitHooks{die});
    const Exchange exchange = make_gradient_exchange(*communicator, of({90}), soon());
    exchange->publish(0);
    armed = rank == 1;
    if (rank == 2) {
      store.get("dying", soon());
    }
    expect_lost_rank_one(*exchange);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
