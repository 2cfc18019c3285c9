#include "core/comm/shm/wait_graph.h"

#include <gtest/gtest.h>

#include <optional>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using testing::meet;
using testing::run_groups;

TEST(WaitGraphs, AreFollowedOverOtherRanksAndBothKindsOfWaits) {
  run_groups(4, [](Group& group) {
    // 0 waits for 1, which waits for 2 in a collective; 3 waits for itself, so to say.
    const auto next = static_cast<std::uint32_t>(group.rank()) + 2;
    if (group.rank() == 0) {
      group.own().awaited_in_transfer.store(next);
    } else if (group.rank() == 1) {
      group.own().awaited_in_transfer.store(1);
      group.own().awaited_in_collective.store(next);
    } else if (group.rank() == 3) {
      group.own().awaited_in_transfer.store(4);
    }
    group.own().interruptions.store(1);
    for (int rank = 0; rank < 4; ++rank) {
      while (group.control(rank).interruptions.load() == 0) {
        std::this_thread::yield();
      }
    }
    EXPECT_TRUE(waits_for(group, 0, 1));
    EXPECT_TRUE(waits_for(group, 0, 2));
    EXPECT_TRUE(waits_for(group, 1, 0));
    EXPECT_FALSE(waits_for(group, 0, 3));
    EXPECT_FALSE(waits_for(group, 2, 0));
    EXPECT_FALSE(waits_for(group, 3, 0));
  });
}

TEST(WaitGraphs, TakeAWaitForAnybodyForOneForEverybody) {
  run_groups(2, [](Group& group) {
    group.own().awaited_in_transfer.store(RankControl::kAnybody);
    EXPECT_TRUE(waits_for(group, group.rank(), 0));
    EXPECT_TRUE(waits_for(group, group.rank(), 1));
  });
}

TEST(WaitGraphs, LeadNowhereWhereThePeersMemoryIsDamaged) {
  run_groups(2, [](Group& group) {
    group.own().awaited_in_transfer.store(1000000);
    EXPECT_FALSE(waits_for(group, group.rank(), 1 - group.rank()));
  });
}

TEST(PublishedWaits, AreThoseOfTheThreadThatBeganLast) {
  RankControl own{};
  PublishedWaits waits(own);
  std::optional<PublishedWaits::Wait> first(waits);
  std::optional<PublishedWaits::Wait> second(waits);
  EXPECT_TRUE(first->set(3));
  EXPECT_FALSE(first->set(3));
  EXPECT_TRUE(second->set(5));
  EXPECT_EQ(own.awaited_in_transfer.load(), 5u);
  second.reset();
  EXPECT_EQ(own.awaited_in_transfer.load(), 3u);
  EXPECT_TRUE(first->set(RankControl::kNobody));
  EXPECT_EQ(own.awaited_in_transfer.load(), RankControl::kNobody);
}

}  // namespace
}  // namespace accelerate_cpp::comm
