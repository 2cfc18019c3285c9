#include "core/comm/split_choice.h"

#include <gtest/gtest.h>

namespace accelerate_cpp::comm {
namespace {

TEST(SplitChoices, GroupTheRanksOfOneColor) {
  const std::vector<SplitChoice> choices{{0, 0}, {1, 0}, {0, 0}, {-1, 0}};
  EXPECT_EQ(members_of(choices, 0), (std::vector<int>{0, 2}));
  EXPECT_EQ(members_of(choices, 1), (std::vector<int>{1}));
  EXPECT_EQ(members_of(choices, 2), (std::vector<int>{}));
}

TEST(SplitChoices, OrderTheRanksByKeyThenByRank) {
  const std::vector<SplitChoice> choices{{0, 5}, {0, 1}, {0, 5}, {0, -3}};
  EXPECT_EQ(members_of(choices, 0), (std::vector<int>{3, 1, 0, 2}));
}

TEST(SplitChoices, AreToldToAllRanks) {
  const SplitChoice others[] = {{7, 1}, {3, 0}};
  std::string given;
  const std::vector<int> members = agree_on_members({7, 0}, [&](const std::string& own) {
    given = own;
    return std::string(reinterpret_cast<const char*>(others), sizeof(others)) + own;
  });
  EXPECT_EQ(given.size(), sizeof(SplitChoice));
  EXPECT_EQ(members, (std::vector<int>{2, 0}));
}

}  // namespace
}  // namespace accelerate_cpp::comm
