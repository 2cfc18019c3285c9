#include "core/comm/slices.h"

#include <gtest/gtest.h>

namespace accelerate_cpp::comm {
namespace {

TEST(SlicesOfAnArray, CoverItOnceInRankOrder) {
  for (const std::size_t element_bytes : {1u, 2u, 4u, 8u}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (std::size_t count = 0; count < 700 && !HasFailure(); ++count) {
        const Slices slices(count, element_bytes, ranks);
        std::size_t end = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(slices.begin(rank), end) << count << " elements, rank " << rank << " of " << ranks;
          end = slices.begin(rank) + slices.count(rank);
        }
        EXPECT_EQ(end, count) << ranks << " ranks";
      }
    }
  }
}

TEST(SlicesOfAnArray, NeverShareACacheLine) {
  for (const std::size_t element_bytes : {1u, 2u, 4u, 8u}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (std::size_t count = 0; count < 700 && !HasFailure(); ++count) {
        const Slices slices(count, element_bytes, ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          const std::size_t begin = slices.begin(rank);
          EXPECT_TRUE(begin == count || begin * element_bytes % 64 == 0) << count << " elements, rank " << rank;
        }
      }
    }
  }
}

TEST(SlicesOfAnArray, DifferByLessThanACacheLinePerRankFromAnEvenDivision) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (std::size_t count = 0; count < 5000 && !HasFailure(); count += 7) {
      const Slices slices(count, 4, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_LT(slices.count(rank), count / static_cast<std::size_t>(ranks) + 17) << count << " over " << ranks;
      }
    }
  }
}

TEST(SlicesOfAnArray, AreEqualButForTheLastOnes) {
  const Slices slices(100, 4, 4);
  EXPECT_EQ(slices.count(0), 32u);
  EXPECT_EQ(slices.count(1), 32u);
  EXPECT_EQ(slices.count(2), 32u);
  EXPECT_EQ(slices.count(3), 4u);
}

TEST(SlicesOfAnArray, AreEmptyForRanksThatAnArrayIsTooSmallFor) {
  const Slices slices(3, 8, 4);
  EXPECT_EQ(slices.count(0), 3u);
  EXPECT_EQ(slices.count(1), 0u);
  EXPECT_EQ(slices.count(3), 0u);
}

TEST(ReductionScale, DividesAveragesAlone) {
  EXPECT_EQ(reduction_scale(ReduceOp::kAvg, 4), 0.25);
  EXPECT_EQ(reduction_scale(ReduceOp::kSum, 4), 1.0);
  EXPECT_EQ(reduction_scale(ReduceOp::kMin, 4), 1.0);
  EXPECT_EQ(reduction_scale(ReduceOp::kMax, 4), 1.0);
  EXPECT_EQ(reduction_scale(ReduceOp::kProduct, 4), 1.0);
}

}  // namespace
}  // namespace accelerate_cpp::comm
