#include "core/grad/shm_scattered_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/half.h"
#include "core/grad/gradient_exchanges.h"

namespace accelerate_cpp::comm {

using namespace grad;
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_threads;
using testing::soon;

std::unique_ptr<ShmScatteredExchange> make(ShmCommunicator& communicator, std::vector<ScatteredBucket> buckets,
                                           std::size_t num_flags = 1) {
  return std::make_unique<ShmScatteredExchange>(communicator, nullptr, std::move(buckets), num_flags, soon());
}

// Buckets of one slot of `count` floats for each rank.
std::vector<ScatteredBucket> alike(std::size_t num_buckets, std::size_t count) {
  return std::vector<ScatteredBucket>(num_buckets, {DType::kFloat32, count, {{0, count}}});
}

// What `rank` gives to `taker` in a bucket: differs in all three, and sums without rounding.
float given(std::size_t bucket, int rank, int taker) {
  return static_cast<float>(100 * bucket) + static_cast<float>(10 * rank) + static_cast<float>(taker);
}

float average_of(std::size_t bucket, int num_ranks, int taker) {
  float sum = 0.0f;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sum += given(bucket, rank, taker);
  }
  return sum / static_cast<float>(num_ranks);
}

// Fills and publishes the next bucket of `count` floats for each rank, whose averages go to `to`.
void give(ScatteredExchange& exchange, std::size_t bucket, int rank, int num_ranks, float* to, bool adds = false) {
  const MemoryView memory = exchange.open(soon());
  const std::size_t count = memory.count / static_cast<std::size_t>(num_ranks);
  for (int taker = 0; taker < num_ranks; ++taker) {
    std::fill_n(static_cast<float*>(memory.data) + static_cast<std::size_t>(taker) * count, count,
                given(bucket, rank, taker));
  }
  exchange.publish({{to, adds}});
  exchange.progress();
}

void finish(ScatteredExchange& exchange) {
  std::uint8_t flag = 0;
  exchange.finish({&flag, 1, DType::kUInt8}, soon());
}

// One round, whose averages are checked.
void run_round(ScatteredExchange& exchange, std::size_t num_buckets, std::size_t count, int rank, int num_ranks) {
  std::vector<std::vector<float>> averages(num_buckets, std::vector<float>(count, -1.0f));
  exchange.begin(soon());
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    give(exchange, bucket, rank, num_ranks, averages[bucket].data());
  }
  finish(exchange);
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    ASSERT_THAT(averages[bucket], Each(average_of(bucket, num_ranks, rank))) << "bucket " << bucket;
  }
}

TEST(ScatteredExchanges, GiveEachRankTheAveragesOfItsShareOverManyRounds) {
  for (const int size : {1, 2, 4}) {
    for (const std::size_t num_buckets : {0u, 1u, 2u, 3u, 7u}) {
      run_ranks(size, [&](ShmCommunicator& communicator) {
        const auto exchange = make(communicator, alike(num_buckets, 1000));
        for (int round = 0; round < 4; ++round) {
          run_round(*exchange, num_buckets, 1000, communicator.rank(), size);
        }
      });
    }
  }
}

TEST(ScatteredExchanges, AddToWhatIsThereOrReplaceItSlotBySlot) {
  run_ranks(2, [](ShmCommunicator& communicator) {
    constexpr std::size_t kCount = 5000;  // more than is added at once
    const int rank = communicator.rank();
    const auto exchange = make(communicator, {{DType::kFloat32, 2 * kCount, {{0, kCount}, {kCount, kCount - 1}}}});
    std::vector<float> added(kCount, 1.0f);
    std::vector<float> replaced(kCount, -1.0f);
    exchange->begin(soon());
    const MemoryView memory = exchange->open(soon());
    auto* const values = static_cast<float*>(memory.data);
    for (std::size_t i = 0; i < memory.count; ++i) {
      values[i] = static_cast<float>(i) * static_cast<float>(1 + 2 * rank);
    }
    exchange->publish({{added.data(), true}, {replaced.data(), false}});
    finish(*exchange);
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto place = static_cast<float>(static_cast<std::size_t>(rank) * 2 * kCount + i);
      ASSERT_EQ(added[i], 1.0f + 2.0f * place) << i;
      ASSERT_EQ(replaced[i], i + 1 < kCount ? 2.0f * (place + kCount) : -1.0f) << i;
    }
  });
}

TEST(ScatteredExchanges, RoundBFloat16Once) {
  run_ranks(4, [](ShmCommunicator& communicator) {
    const auto exchange = make(communicator, {{DType::kBFloat16, 3, {{0, 3}}}});
    std::array<BFloat16, 3> averages{};
    exchange->begin(soon());
    const MemoryView memory = exchange->open(soon());
    const auto own = static_cast<float>(communicator.rank());
    std::fill_n(static_cast<BFloat16*>(memory.data), memory.count, to_bfloat16(256.0f + 2.0f * own));
    exchange->publish({{averages.data(), false}});
    finish(*exchange);
    EXPECT_EQ(averages[0].bits, to_bfloat16(259.0f).bits);
  });
}

TEST(ScatteredExchanges, TellWhichFlagsSomeRankHas) {
  run_ranks(3, [](ShmCommunicator& communicator) {
    const auto exchange = make(communicator, alike(1, 1), 4);
    for (int round = 0; round < 3; ++round) {
      float average = 0.0f;
      exchange->begin(soon());
      give(*exchange, 0, communicator.rank(), 3, &average);
      std::array<std::uint8_t, 4> used{};
      used[static_cast<std::size_t>(communicator.rank() + round) % 3] = round == 2 ? 0 : 1;
      exchange->finish({used.data(), used.size(), DType::kUInt8}, soon());
      if (round < 2) {
        EXPECT_THAT(used, ElementsAre(1, 1, 1, 0));
      } else {
        EXPECT_THAT(used, Each(0));
      }
    }
  });
}

TEST(ScatteredExchanges, FillABucketAgainOnlyWhenAllRanksHaveReadIt) {
  std::atomic<bool> filled{false};
  run_ranks(2, [&](ShmCommunicator& communicator) {
    constexpr std::size_t kBuckets = ShmScatteredExchange::kPlaces + 1;
    const auto exchange = make(communicator, alike(kBuckets, 100));
    std::vector<std::vector<float>> averages(kBuckets, std::vector<float>(100));
    exchange->begin(soon());
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      if (communicator.rank() == 1 && bucket == 0) {
        // Rank 0 goes on as far as it can: it must not come to the last bucket before this rank has read the first.
        for (int look = 0; look < 1000; ++look) {
          std::this_thread::yield();
          ASSERT_FALSE(filled);
        }
      }
      give(*exchange, bucket, communicator.rank(), 2, averages[bucket].data());
      filled = filled || (communicator.rank() == 0 && bucket == kBuckets - 1);
    }
    finish(*exchange);
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      EXPECT_THAT(averages[bucket], Each(average_of(bucket, 2, communicator.rank())));
    }
  });
}

TEST(ScatteredExchanges, NoticeModelsThatDiffer) {
  run_ranks(2, [](ShmCommunicator& communicator) {
    const std::size_t count = communicator.rank() == 0 ? 10 : 11;
    EXPECT_THAT(message_of<MismatchedCollective>([&] { make(communicator, alike(1, count)); }),
                HasSubstr("rank 0 and rank 1 prepared models with different parameters"));
  });
}

// Rank `size` - 1 does `leave` within a round, the others learn of it where they wait, and all go on.
template <class Error, class Leave>
void leave_and_go_on(int size, const Leave& leave) {
  run_ranks(size, [&](ShmCommunicator& communicator) {
    const int rank = communicator.rank();
    const auto exchange = make(communicator, alike(5, 100));
    run_round(*exchange, 5, 100, rank, size);
    if (rank == size - 1) {
      leave(communicator, *exchange);
    } else {
      EXPECT_THROW(run_round(*exchange, 5, 100, rank, size), Error);
    }
    for (int round = 0; round < 3; ++round) {
      run_round(*exchange, 5, 100, rank, size);
    }
  });
}

TEST(ScatteredExchanges, GoOnAfterARankWithdrewWhileOthersWaitForABucket) {
  leave_and_go_on<PeerWithdrew>(
      2, [](Communicator& communicator, ScatteredExchange&) { communicator.withdraw("out of memory", soon()); });
  leave_and_go_on<PeerWithdrew>(3, [](Communicator& communicator, ScatteredExchange& exchange) {
    float averages[100];
    exchange.begin(soon());
    give(exchange, 0, 2, 3, averages);
    communicator.withdraw("out of memory", soon());
  });
}

TEST(ScatteredExchanges, GoOnAfterARankWithdrewWithEverythingPublished) {
  leave_and_go_on<PeerWithdrew>(2, [](Communicator& communicator, ScatteredExchange& exchange) {
    std::vector<std::vector<float>> averages(5, std::vector<float>(100));
    exchange.begin(soon());
    for (std::size_t bucket = 0; bucket < 5; ++bucket) {
      give(exchange, bucket, 1, 2, averages[bucket].data());
    }
    communicator.withdraw("out of memory", soon());
  });
}

TEST(ScatteredExchanges, SayThatARankIsInAnotherCollective) {
  leave_and_go_on<MismatchedCollective>(2, [](Communicator& communicator, ScatteredExchange&) {
    EXPECT_THROW(communicator.barrier(soon()), MismatchedCollective);
  });
}

TEST(ScatteredExchanges, EndARoundInWhichAnotherCollectiveFailed) {
  run_ranks(2, [](ShmCommunicator& communicator) {
    const auto exchange = make(communicator, alike(3, 10));
    std::vector<std::vector<float>> averages(3, std::vector<float>(10));
    exchange->begin(soon());
    for (std::size_t bucket = 0; bucket < 2; ++bucket) {
      give(*exchange, bucket, communicator.rank(), 2, averages[bucket].data());
    }
    float value = 1.0f;
    EXPECT_THROW(
        {
          if (communicator.rank() == 0) {
            communicator.barrier(soon());
          } else {
            communicator.all_reduce({&value, 1, DType::kFloat32}, ReduceOp::kSum, soon());
          }
        },
        MismatchedCollective);
    EXPECT_THAT(message_of<MismatchedCollective>([&] { exchange->open(soon()); }),
                HasSubstr("ended another collective within this backward pass"));
    run_round(*exchange, 3, 10, communicator.rank(), 2);
  });
}

TEST(ScatteredExchanges, GoOnAfterAProbeEndedAWaitForABucket) {
  struct Interrupted {};
  std::atomic<bool> interrupts{false};
  std::atomic<bool> interrupted{false};
  run_threads(2, [&](Store& store, int rank) {
    WaitHooks hooks;
    hooks.probe = [&, rank] {
      if (rank == 1 && interrupts.exchange(false)) {
        throw Interrupted();
      }
    };
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), hooks);
    const auto exchange = make(*communicator, alike(5, 100));
    if (rank == 1) {
      interrupts = true;
      EXPECT_THROW(run_round(*exchange, 5, 100, 1, 2), Interrupted);
      interrupted = true;
    } else {
      while (!interrupted) {
        std::this_thread::yield();
      }
      EXPECT_THROW(run_round(*exchange, 5, 100, 0, 2), PeerWithdrew);
    }
    run_round(*exchange, 5, 100, rank, 2);
  });
}

TEST(ScatteredExchanges, NameARankThatHasEnded) {
  run_ranks(2, [](ShmCommunicator& communicator) {
    const auto exchange = make(communicator, alike(5, 100));
    if (communicator.rank() == 1) {
      communicator.leave();
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { run_round(*exchange, 5, 100, 0, 2); }), HasSubstr("rank 1 has left"));
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
