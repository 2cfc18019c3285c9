// The operations of hierarchical_blocks.cpp beyond what conformance covers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/hierarchical.h"
#include "core/comm/hosts_of_threads.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_hosts;
using testing::soon;

// One tensor whose consecutive parts belong to the ranks.
class Parted {
 public:
  explicit Parted(const std::vector<std::size_t>& counts)
      : values_(std::accumulate(counts.begin(), counts.end(), std::size_t{0})) {
    std::size_t begin = 0;
    for (const std::size_t count : counts) {
      views_.push_back({values_.data() + begin, count, DType::kInt32});
      begin += count;
    }
  }
  const std::vector<MemoryView>& views() const { return views_; }
  std::vector<ConstMemoryView> const_views() const { return {views_.begin(), views_.end()}; }
  std::vector<std::int32_t> values_of(int rank) const {
    const MemoryView view = views_[static_cast<std::size_t>(rank)];
    const auto* const first = static_cast<const std::int32_t*>(view.data);
    return {first, first + view.count};
  }
  void fill(int rank, std::int32_t value) {
    const MemoryView view = views_[static_cast<std::size_t>(rank)];
    std::fill_n(static_cast<std::int32_t*>(view.data), view.count, value);
  }

 private:
  std::vector<std::int32_t> values_;
  std::vector<MemoryView> views_;
};

// More than one piece between the hosts, the last one incomplete, for four ranks.
constexpr std::size_t kManyElements = (std::size_t{16} << 20) / 4 / 4 + 1000;

TEST(HierarchicalBlocks, GatherOperandsOfSeveralPiecesInPlace) {
  run_hosts({0, 1, 0, 1}, [](Hierarchical& communicator) {
    const int rank = communicator.rank();
    Parted outputs({kManyElements, 3, 0, kManyElements + 1});
    outputs.fill(rank, 10 + rank);
    communicator.all_gather(outputs.views()[static_cast<std::size_t>(rank)], outputs.views(), soon());
    for (int r = 0; r < 4; ++r) {
      EXPECT_THAT(outputs.values_of(r), Each(10 + r));
    }
  });
}

TEST(HierarchicalBlocks, ReduceAndScatterOperandsOfSeveralPiecesInPlace) {
  run_hosts({0, 1, 1, 0}, [](Hierarchical& communicator) {
    const int rank = communicator.rank();
    Parted inputs({kManyElements, 3, 0, kManyElements + 1});
    for (int r = 0; r < 4; ++r) {
      inputs.fill(r, (r + 1) * (rank + 1));
    }
    communicator.reduce_scatter(inputs.const_views(), inputs.views()[static_cast<std::size_t>(rank)], ReduceOp::kSum,
                                soon());
    EXPECT_THAT(inputs.values_of(rank), Each((rank + 1) * 10));
  });
}

TEST(HierarchicalBlocks, RaiseOnEveryRankWhenTwoDisagreeAboutASize) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    Parted inputs({1, 1, 1, 1});
    Parted outputs({1, communicator.rank() == 3 ? std::size_t{2} : 1, 1, 1});
    const auto all_to_all = [&] { communicator.all_to_all(inputs.const_views(), outputs.views(), soon()); };
    EXPECT_THAT(message_of<MismatchedCollective>(all_to_all),
                HasSubstr("rank 1 and rank 3 disagree about a size: 1 elements are given, 2 expected"));
  });
}

TEST(HierarchicalBlocks, SplitIntoHostsGivesPlainSharedMemory) {
  run_hosts({0, 1, 0, 1}, [](Hierarchical& communicator) {
    const auto part = communicator.split(communicator.rank() % 2, 0, soon());
    EXPECT_NE(dynamic_cast<ShmCommunicator*>(part.get()), nullptr);
    EXPECT_EQ(part->rank(), communicator.rank() / 2);
  });
}

TEST(HierarchicalBlocks, SplitAcrossHostsKeepsWhichRanksShareOne) {
  run_hosts({0, 1, 0, 1, 1}, [](Hierarchical& communicator) {
    const int rank = communicator.rank();
    const auto part = communicator.split(rank == 1 ? -1 : 7, 10 - rank, soon());
    ASSERT_EQ(part == nullptr, rank == 1);
    if (part) {  // old ranks 4, 3, 2, 0
      const auto* const hosts = dynamic_cast<Hierarchical*>(part.get());
      ASSERT_NE(hosts, nullptr);
      EXPECT_THAT(hosts->layout().ranks_of(0), ElementsAre(0, 1));
      EXPECT_THAT(hosts->layout().ranks_of(1), ElementsAre(2, 3));
      std::int32_t value = rank;
      part->all_reduce({&value, 1, DType::kInt32}, ReduceOp::kSum, soon());
      EXPECT_EQ(value, 9);
    }
  });
}

TEST(HierarchicalBlocks, SplitWithOneRankPerHostCanBeSplitAgain) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    const auto across = communicator.split(communicator.rank() % 2, 0, soon());
    const auto again = across->split(0, -across->rank(), soon());
    EXPECT_EQ(again->rank(), 1 - across->rank());
    std::int32_t value = communicator.rank();
    again->broadcast({&value, 1, DType::kInt32}, 0, soon());
    EXPECT_EQ(value, 2 + communicator.rank() % 2);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
