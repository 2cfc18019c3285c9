// The ways in which operands travel, at every size at which one gives way to another, compared with plain loops.
#include "core/comm/shm/block_collective.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/comm/shm/groups.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/shm/step_runner.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Memory;
using testing::Placement;
using testing::soon;
using testing::Step;

constexpr CallKind kKinds[] = {CallKind::kAllReduce, CallKind::kReduce, CallKind::kReduceScatter, CallKind::kBroadcast,
                               CallKind::kAllGather, CallKind::kGather, CallKind::kScatter,       CallKind::kAllToAll};
constexpr std::size_t kWorthInPlaceBytes = 8 * 1024;

bool has_block_per_rank(CallKind kind) {
  return kind != CallKind::kAllReduce && !gives_one_block(kind);
}

class BlockCollectives : public ::testing::TestWithParam<int> {
 protected:
  static std::size_t size() { return static_cast<std::size_t>(GetParam()); }

  template <class Body>
  static void run_ranks(const Body& body) {
    testing::run_threads(GetParam(), [&](Store& store, int rank) {
      const auto communicator = ShmCommunicator::connect(store, rank, GetParam(), soon(), {});
      Memory memory(*communicator);
      unsigned seed = 0;
      body([&](Step step) {
        step.seed = ++seed;
        EXPECT_EQ(testing::wrong_elements(*communicator, step, memory), 0u)
            << to_string(step) << " on rank " << communicator->rank();
      });
    });
  }

  // Blocks of equal size; `bytes` is what a rank gives, in one block or in all of them together.
  static Step equal_step(CallKind kind, DType dtype, std::size_t bytes, int change, Placement placement) {
    const std::size_t block_bytes = has_block_per_rank(kind) ? bytes / size() / 64 * 64 : bytes;
    const std::size_t count = block_bytes / element_size(dtype) + static_cast<std::size_t>(change);
    Step step{kind, dtype};
    step.counts.assign(kind == CallKind::kAllToAll ? size() * size() : size(), count);
    step.placements.assign(size(), placement);
    step.root = GetParam() - 1;
    return step;
  }
};

TEST_P(BlockCollectives, AreRightAboutTheSizeUpToWhichEverythingFitsIntoASlot) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      for (const Placement placement : {Placement::kHeap, Placement::kKept}) {
        for (const int change : {-1, 0, 1}) {
          check(equal_step(kind, DType::kInt8, kSmallBytes, change, placement));
          check(equal_step(kind, DType::kInt64, kSmallBytes, change, placement));
        }
      }
    }
  });
}

TEST_P(BlockCollectives, AreRightAboutTheSizeFromWhichTheyWorkInPlace) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      for (const int change : {-1, 0, 1}) {
        check(equal_step(kind, DType::kInt16, kWorthInPlaceBytes, change, Placement::kKept));
        check(equal_step(kind, DType::kInt16, kWorthInPlaceBytes + 64 * size(), change, Placement::kShared));
      }
    }
  });
}

TEST_P(BlockCollectives, AreRightAboutTheBoundariesOfPieces) {
  run_ranks([](const auto& check) {
    const std::size_t smallest = piece_bytes_for(1);
    for (const CallKind kind : kKinds) {
      for (const std::size_t pieces : {1u, 3u, 8u}) {
        for (const int change : {-1, 0, 1}) {
          check(equal_step(kind, DType::kInt32, pieces * smallest, change, Placement::kHeap));
        }
      }
      check(equal_step(kind, DType::kInt64, 9 * smallest, 7, Placement::kHeap));
      check(equal_step(kind, DType::kInt64, 9 * smallest, 7, Placement::kShared));
    }
  });
}

TEST_P(BlockCollectives, AreRightWhenPiecesAreAsLargeAsTheirSlots) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      check(equal_step(kind, DType::kInt64, 8 * kPieceBytes + 64 * size(), 1, Placement::kHeap));
    }
  });
}

// An all_reduce rounds its pieces down so that every rank's slice is a whole number of cache lines.
TEST_P(BlockCollectives, AreRightAboutTheBoundariesOfPiecesThatAreReduced) {
  run_ranks([](const auto& check) {
    const std::size_t piece = piece_bytes_for(1) / 64 / size() * 64 * size();
    for (const std::size_t pieces : {1u, 3u, 5u}) {
      for (const int change : {-17, -1, 0, 1, 17}) {
        check(equal_step(CallKind::kAllReduce, DType::kFloat32, pieces * piece, change, Placement::kHeap));
      }
    }
  });
}

TEST_P(BlockCollectives, AreRightWhenOnlySomeRanksHaveTheirOperandsInSharedMemory) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      for (const std::size_t bytes : {kWorthInPlaceBytes + 64 * size(), 2 * kSmallBytes}) {
        for (unsigned shared = 0; shared < (1u << size()); ++shared) {
          Step step = equal_step(kind, DType::kInt32, bytes, 1, Placement::kHeap);
          step.root = static_cast<int>(shared % size());
          for (unsigned rank = 0; rank < size(); ++rank) {
            step.placements[rank] = ((shared >> rank) & 1) != 0 ? Placement::kKept : Placement::kHeap;
          }
          check(step);
        }
      }
    }
  });
}

TEST_P(BlockCollectives, AreRightWhenBlocksDifferInSize) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      for (const std::size_t longest : {100u, 5000u, 100000u}) {
        for (const Placement placement : {Placement::kHeap, Placement::kKept}) {
          Step step = equal_step(kind, DType::kFloat16, 2 * longest, 0, placement);
          for (std::size_t i = 0; i < step.counts.size(); ++i) {
            const std::size_t sizes[] = {longest, 0, longest / 3, 1, longest - 1};
            step.counts[i] = sizes[(i * 3 + 1) % 5];
          }
          check(step);
          std::fill(step.counts.begin(), step.counts.end(), 0);
          step.counts.back() = longest;  // nobody but the last rank has anything, or gets it
          check(step);
        }
      }
    }
  });
}

TEST_P(BlockCollectives, AreRightInPlaceAndFromEveryRoot) {
  run_ranks([](const auto& check) {
    for (const CallKind kind : kKinds) {
      for (int root = 0; root < GetParam(); ++root) {
        for (const std::size_t bytes : {std::size_t{500}, 3 * kSmallBytes}) {
          for (const Placement placement : {Placement::kHeap, Placement::kKept}) {
            Step step = equal_step(kind, DType::kInt16, bytes, 0, placement);
            step.root = root;
            step.in_place = true;
            step.shift = 3;
            check(step);
            step.apart = true;
            check(step);
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BlockCollectives, ::testing::Values(1, 2, 3));

TEST(BlockCollectiveKinds, GiveOneBlockToAllOrOneToEach) {
  for (const CallKind kind : {CallKind::kBroadcast, CallKind::kAllGather, CallKind::kGather, CallKind::kReduce}) {
    EXPECT_TRUE(gives_one_block(kind)) << name(kind);
  }
  for (const CallKind kind : {CallKind::kReduceScatter, CallKind::kScatter, CallKind::kAllToAll}) {
    EXPECT_FALSE(gives_one_block(kind)) << name(kind);
  }
}

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;

// Rank 0 and 1 gather what they give, counts[r] bytes each, from `data`; returns the ranges that rank 0 took, after a
// look at where `sources` pointed.
Ranges ranges_taken(const std::vector<std::size_t>& counts, bool shared) {
  Ranges ranges;
  testing::run_groups(2, kStagingBytes, [&](Group& group) {
    Staging staging(group);
    const std::size_t own_bytes = counts[static_cast<std::size_t>(group.rank())];
    const OwnedBlock block(group.arena(), own_bytes + 1);
    std::vector<std::byte> heap(own_bytes);
    std::byte* const own = shared ? block.segment()->data() : heap.data();
    std::fill(own, own + own_bytes, static_cast<std::byte>(group.rank() + 1));
    const auto consume = [&](const void* const* sources, std::size_t begin, std::size_t length) {
      for (std::size_t r = 0; r < 2; ++r) {
        EXPECT_EQ(sources[r] == nullptr, begin >= counts[r]) << "rank " << r << " at " << begin;
        if (sources[r] != nullptr) {
          const auto* const bytes = static_cast<const std::byte*>(sources[r]);
          const std::size_t last = std::min(length, counts[r] - begin) - 1;
          EXPECT_EQ(bytes[0], static_cast<std::byte>(r + 1));
          EXPECT_EQ(bytes[last], static_cast<std::byte>(r + 1));
        }
      }
      if (group.rank() == 0) {
        ranges.emplace_back(begin, length);
      }
    };
    Operation operation{{CallKind::kAllGather, DType::kUInt8}};
    operation.has_counts = true;
    const Blocks blocks{{{own, own_bytes, DType::kUInt8}}, {true, true}, {counts[0], counts[1]}, consume};
    BlockCollective::run(group, staging, operation, blocks, soon());
    testing::meet(group);
  });
  return ranges;
}

TEST(BlocksThatTravel, AreTakenAtOnceWhenTheyAreSmallOrInPlace) {
  EXPECT_EQ(ranges_taken({100, 70}, false), (Ranges{{0, 100}}));
  EXPECT_EQ(ranges_taken({500000, 400000}, true), (Ranges{{0, 500000}}));
}

TEST(BlocksThatTravel, AreTakenPieceByPieceOneAfterTheOtherWhenTheyAreStaged) {
  constexpr std::size_t kBytes = 1000001;
  const Ranges ranges = ranges_taken({kBytes, kBytes / 3}, false);
  std::size_t end = 0;
  for (const auto& [begin, length] : ranges) {
    EXPECT_EQ(begin, end);
    EXPECT_LE(length, kPieceBytes);
    end = begin + length;
  }
  EXPECT_EQ(end, kBytes);
  EXPECT_GT(ranges.size(), 1u);
}

TEST(BlocksThatTravel, AreNotTakenWhenThereIsNothingOrWhenRanksDisagree) {
  EXPECT_TRUE(ranges_taken({0, 0}, false).empty());
  testing::run_groups(2, kStagingBytes, [&](Group& group) {
    Staging staging(group);
    const std::vector<std::byte> own(200000);
    Operation operation{{CallKind::kAllGather, DType::kUInt8}};
    operation.has_counts = true;
    const auto consume = [](const void* const*, std::size_t, std::size_t) { ADD_FAILURE() << "something was taken"; };
    const Blocks blocks{{{own.data(), own.size(), DType::kUInt8}}, {true, true}, {200000, 199999}, consume};
    EXPECT_THROW(BlockCollective::run(group, staging, operation, blocks, soon()), MismatchedCollective);
    EXPECT_EQ(staging.begin(kPieceBytes), 0u);
    testing::meet(group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
