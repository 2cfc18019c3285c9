#include "torch_bridge/c10d_scattered_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "torch_bridge/backends.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::run_backends;
using comm::testing::soon;
using ::testing::Each;
using ::testing::ElementsAre;

BackendPointer pointer_to(comm::C10dBackend& backend) {
  return BackendPointer::reclaim_copy(&backend);
}

// One round of three buckets, of which the averages of the second are added to ones.
void run_round(ScatteredExchange& exchange, int rank, int size) {
  constexpr std::size_t kCount = 300;
  std::vector<std::vector<float>> averages(3, std::vector<float>(kCount, 1.0f));
  exchange.begin(soon());
  for (std::size_t bucket = 0; bucket < 3; ++bucket) {
    const MemoryView memory = exchange.open(soon());
    ASSERT_EQ(memory.count, kCount * static_cast<std::size_t>(size));
    for (int taker = 0; taker < size; ++taker) {
      std::fill_n(static_cast<float*>(memory.data) + static_cast<std::size_t>(taker) * kCount, kCount,
                  static_cast<float>(100 * static_cast<int>(bucket) + 10 * rank + taker));
    }
    exchange.publish({{averages[bucket].data(), bucket == 1}});
  }
  std::vector<std::uint8_t> used{static_cast<std::uint8_t>(rank == 0), 0};
  exchange.finish({used.data(), used.size(), DType::kUInt8}, soon());
  EXPECT_THAT(used, ElementsAre(1, 0));
  const float rank_mean = 10.0f * static_cast<float>(size - 1) / 2.0f;
  for (std::size_t bucket = 0; bucket < 3; ++bucket) {
    const float average = 100.0f * static_cast<float>(bucket) + rank_mean + static_cast<float>(rank);
    EXPECT_THAT(averages[bucket], Each(average + (bucket == 1 ? 1.0f : 0.0f)));
  }
}

const std::vector<ScatteredBucket> kBuckets(3, {DType::kFloat32, 300, {{0, 300}}});

TEST(C10dScatteredExchanges, AverageOneBucketAfterTheOtherOrWhileTheNextIsFilled) {
  for (const bool overlaps : {false, true}) {
    run_backends(3, [overlaps](comm::C10dBackend& backend, int rank) {
      C10dScatteredExchange exchange(pointer_to(backend), {}, kBuckets, overlaps);
      run_round(exchange, rank, 3);
      run_round(exchange, rank, 3);
    });
  }
}

TEST(C10dScatteredExchanges, ForgetARoundThatWasNotFinished) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    C10dScatteredExchange exchange(pointer_to(backend), {}, kBuckets, true);
    std::vector<float> averages(300);
    exchange.begin(soon());
    exchange.open(soon());
    exchange.publish({{averages.data(), false}});
    run_round(exchange, rank, 2);
  });
}

TEST(C10dScatteredExchanges, AverageOverReplicas) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    // Each rank has all rows, so that only replicas, which are the two ranks, differ.
    C10dScatteredExchange exchange(comm::testing::alone(), pointer_to(backend), {{DType::kFloat64, 2, {{0, 2}}}},
                                   false);
    double averages[2];
    exchange.begin(soon());
    std::fill_n(static_cast<double*>(exchange.open(soon()).data), 2, rank == 0 ? 3.0 : 4.0);
    exchange.publish({{averages, false}});
    std::uint8_t used = static_cast<std::uint8_t>(rank);
    exchange.finish({&used, 1, DType::kUInt8}, soon());
    EXPECT_THAT(averages, Each(3.5));
    EXPECT_EQ(used, 1);
  });
}

TEST(C10dScatteredExchanges, RefuseIntegers) {
  C10dScatteredExchange exchange(comm::testing::alone(), {}, {{DType::kInt32, 2, {{0, 2}}}}, false);
  exchange.begin(soon());
  exchange.open(soon());
  EXPECT_THROW(exchange.publish({{nullptr, false}}), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::grad
