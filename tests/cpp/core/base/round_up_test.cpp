#include "core/base/round_up.h"

#include <gtest/gtest.h>

namespace accelerate_cpp {
namespace {

TEST(RoundUp, GivesTheNextMultiple) {
  EXPECT_EQ(round_up(0, 64), 0u);
  EXPECT_EQ(round_up(1, 64), 64u);
  EXPECT_EQ(round_up(64, 64), 64u);
  EXPECT_EQ(round_up(65, 64), 128u);
  EXPECT_EQ(round_up(7, 1), 7u);
}

}  // namespace
}  // namespace accelerate_cpp
