#include "core/comm/shm/staged_all_reduce.h"

#include <gtest/gtest.h>

#include "core/comm/communicator_conformance.h"
#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Operand;
using testing::soon;

// Runs operations of the given sizes one after the other on `size` thread ranks and compares each with plain loops.
void reduce_in_turn(int size, DType dtype, const std::vector<std::size_t>& counts, ReduceOp op = ReduceOp::kSum) {
  std::vector<double> factors;
  for (int rank = 0; rank < size; ++rank) {
    factors.push_back(testing::factor(rank));
  }
  const double* const factors_if_used = op == ReduceOp::kPreMulSum ? factors.data() : nullptr;
  testing::run_threads(size, [&](Store& store, int rank) {
    Group group(store, rank, size, kStagingBytes, soon(), {});
    Staging staging(group);
    for (const std::size_t count : counts) {
      Operand data(count, dtype);
      const MemoryView view = data.fill(rank).view();
      const Deadline deadline = soon();
      StagedAllReduce(staging, rank, size, view, op, factors_if_used, deadline).run();
      EXPECT_EQ(testing::differences(view, 0, [&](std::size_t i) { return testing::reduced(size, i, dtype, op); }), 0u)
          << count << " " << name(dtype) << " on " << size << " ranks";
    }
  });
}

TEST(StagedAllReduce, HandlesSizesAroundWholePieces) {
  const std::size_t piece = kPieceBytes / sizeof(float);
  for (const int size : {2, 3, 4}) {
    reduce_in_turn(size, DType::kFloat32, {piece - 1, piece, piece + 1, 3 * piece, 5 * piece + 17});
  }
}

TEST(StagedAllReduce, HandlesOperandsThatTravelInSmallerPieces) {
  const std::size_t smallest = piece_bytes_for(1) / sizeof(float);
  ASSERT_LT(smallest * sizeof(float), kPieceBytes);
  reduce_in_turn(3, DType::kFloat32, {smallest - 1, smallest, smallest + 1, 4 * smallest + 1, 10 * smallest});
}

TEST(StagedAllReduce, MultipliesEveryOperandByTheFactorOfItsRank) {
  const std::size_t piece = kPieceBytes / sizeof(float);
  reduce_in_turn(3, DType::kFloat32, {5, piece + 1}, ReduceOp::kPreMulSum);
}

TEST(StagedAllReduce, LeavesRanksWithoutASliceWhenThereIsLittleData) {
  reduce_in_turn(5, DType::kInt8, {1, 64, 65, 200});
}

TEST(StagedAllReduce, ReusesSlotsOverManyOperations) {
  reduce_in_turn(2, DType::kBFloat16, std::vector<std::size_t>(40, kPieceBytes));
}

}  // namespace
}  // namespace accelerate_cpp::comm
