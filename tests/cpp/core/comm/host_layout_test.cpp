#include "core/comm/host_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace accelerate_cpp::comm {
namespace {

using ::testing::ElementsAre;

TEST(HostLayout, CountsHostsInTheOrderOfTheirFirstRank) {
  const HostLayout layout({70, 3, 70, 5, 3});
  EXPECT_EQ(layout.size(), 5);
  EXPECT_EQ(layout.num_hosts(), 3);
  EXPECT_THAT(layout.ranks_of(0), ElementsAre(0, 2));
  EXPECT_THAT(layout.ranks_of(1), ElementsAre(1, 4));
  EXPECT_THAT(layout.ranks_of(2), ElementsAre(3));
  EXPECT_EQ(layout.host_of(4), 1);
  EXPECT_EQ(layout.index_within_host(4), 1);
}

TEST(HostLayout, MakesTheFirstRankOfAHostItsLeader) {
  const HostLayout layout({0, 1, 0, 1});
  EXPECT_EQ(layout.leader_of(1), 1);
  EXPECT_TRUE(layout.is_leader(0));
  EXPECT_TRUE(layout.is_leader(1));
  EXPECT_FALSE(layout.is_leader(2));
}

TEST(HostLayout, TellsTheRanksOfARailByHost) {
  const HostLayout layout({0, 1, 0, 1, 1});
  EXPECT_THAT(layout.ranks_of_rail(0), ElementsAre(0, 1));
  EXPECT_THAT(layout.ranks_of_rail(1), ElementsAre(2, 3));
}

TEST(HostLayout, OfNoRanksHasNoHosts) {
  EXPECT_EQ(HostLayout({}).num_hosts(), 0);
}

}  // namespace
}  // namespace accelerate_cpp::comm
