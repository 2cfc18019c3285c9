#include "core/comm/all_reduce_together.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/comm/operands.h"
#include "core/comm/ranks.h"
#include "core/comm/solo.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shm_communicator.h"
#endif

namespace accelerate_cpp::comm {
namespace {

using testing::Operand;
using testing::soon;

// Counts of operands whose bytes are below, at and above what travels together, and together exceed the room.
std::vector<std::size_t> counts_around_the_limits(DType dtype) {
  const std::size_t small = AllReduceTogether::kSmallOperandBytes / element_size(dtype);
  std::vector<std::size_t> counts{0, 1, 3, small, small + 1, 5 * small};
  counts.insert(counts.end(), AllReduceTogether::kRoomBytes / AllReduceTogether::kSmallOperandBytes + 1, small - 1);
  return counts;
}

#if defined(ACCELERATE_HAS_SHM)

TEST(AllReduceTogether, SumsEveryOperandOfEveryDType) {
  testing::run_threads(3, [](Store& store, int rank) {
    AllReduceTogether together(ShmCommunicator::connect(store, rank, 3, soon(), {}));
    for (const bool in_place : {false, true}) {
      std::vector<std::unique_ptr<Operand>> inputs;
      std::vector<std::unique_ptr<Operand>> outputs;
      std::vector<Reduced> operands;
      for (const DType dtype : testing::kAllDTypes) {  // one after the other, so that dtypes alternate
        for (const std::size_t count : counts_around_the_limits(dtype)) {
          inputs.push_back(std::make_unique<Operand>(count, dtype));
          outputs.push_back(std::make_unique<Operand>(count, dtype));
          inputs.back()->fill(rank);
          operands.push_back({inputs.back()->view(), in_place ? inputs.back()->view() : outputs.back()->view(), {}});
        }
      }
      together.run(operands, ReduceOp::kMax, soon());
      for (const Reduced& operand : operands) {
        const auto largest = [&operand](std::size_t index) {
          double found = 0.0;
          for (int peer = 0; peer < 3; ++peer) {
            found = std::max(found, testing::operand(peer, index, operand.output.dtype));
          }
          return found;
        };
        EXPECT_EQ(testing::differences(operand.output, rank, largest), 0u)
            << name(operand.output.dtype) << " " << operand.output.count;
      }
    }
  });
}

TEST(AllReduceTogether, NamesOperandsThatDiffer) {
  testing::run_threads(2, [](Store& store, int rank) {
    AllReduceTogether together(ShmCommunicator::connect(store, rank, 2, soon(), {}));
    const Operand one(rank == 0 ? 4 : 5, DType::kFloat32);
    const Operand two(2, DType::kFloat32);
    EXPECT_THROW(together.run({{one.view(), one.view(), {}}, {two.view(), two.view(), {}}}, ReduceOp::kSum, soon()),
                 MismatchedCollective);
    const Operand other(rank == 0 ? 5 : 4, DType::kFloat32);  // nine elements on both ranks
    EXPECT_THROW(together.run({{one.view(), one.view(), {}}, {other.view(), other.view(), {}}}, ReduceOp::kSum, soon()),
                 MismatchedCollective);
    const Operand three(6, DType::kFloat32);
    const Shape shape = rank == 0 ? Shape{2, 3} : Shape{3, 2};
    EXPECT_THROW(
        together.run({{two.view(), two.view(), {2}}, {three.view(), three.view(), shape}}, ReduceOp::kSum, soon()),
        MismatchedCollective);
  });
}

#endif

TEST(AllReduceTogether, CopiesWhereThereIsOneRank) {
  AllReduceTogether together(std::make_shared<SoloCommunicator>());
  Operand input(100, DType::kFloat32);
  input.fill(2);
  const Operand output(100, DType::kFloat32);
  const Operand other(1, DType::kFloat64);
  together.run({{input.view(), output.view(), {}}, {other.view(), other.view(), {}}}, ReduceOp::kAvg, soon());
  EXPECT_EQ(testing::differences(output.view(), 0,
                                 [](std::size_t index) { return testing::operand(2, index, DType::kFloat32); }),
            0u);
}

}  // namespace
}  // namespace accelerate_cpp::comm
