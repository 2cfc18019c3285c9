#include "core/comm/nccl/group_board.h"

#include <gtest/gtest.h>

#include "core/comm/memory_store.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm::testing {
namespace {

// A store whose server is gone.
class BrokenStore final : public Store {
 public:
  void set(const std::string&, const std::string&) override { throw std::runtime_error("connection refused"); }
  std::string get(const std::string&, Deadline) override { throw std::runtime_error("connection refused"); }
};

class GroupBoardTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  GroupBoard first_{store_, "group", 0};
  GroupBoard second_{store_, "group", 1};
  GroupBoard other_group_{store_, "group2", 1};
};

TEST_F(GroupBoardTest, IsEmptyAtFirst) {
  EXPECT_FALSE(first_.failure().has_value());
  EXPECT_FALSE(first_.call_of(1, 1).has_value());
  EXPECT_FALSE(first_.last_operation_of(1).has_value());
  EXPECT_FALSE(first_.look("/anything").has_value());
}

TEST_F(GroupBoardTest, ShowsAFailureToTheGroupAlone) {
  first_.publish_failure({true, 17, "one\ntwo"});
  const auto failure = second_.failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_TRUE(failure->is_mismatch);
  EXPECT_EQ(failure->sequence, 17u);
  EXPECT_EQ(failure->text, "one\ntwo");
  EXPECT_FALSE(other_group_.failure().has_value());
}

TEST_F(GroupBoardTest, TellsAMismatchFromAnotherFailure) {
  first_.publish_failure({false, 3, "lost"});
  EXPECT_FALSE(second_.failure()->is_mismatch);
}

TEST_F(GroupBoardTest, TakesAnythingInTheKeyForAFailure) {
  store_->set("group/failure", "scribble");
  EXPECT_EQ(first_.failure()->text, "scribble");
  store_->set("group/failure", "Mx\nscribble");
  EXPECT_EQ(first_.failure()->sequence, 0u);
}

TEST_F(GroupBoardTest, ShowsTheCallOfARankInAnOperation) {
  CallRecord record{CallKind::kBroadcast};
  record.count = 5;
  first_.publish_call(2, record);
  EXPECT_EQ(second_.call_of(0, 2)->count, 5u);
  EXPECT_EQ(second_.call_of(0, 2, soon())->count, 5u);
  EXPECT_FALSE(second_.call_of(0, 1).has_value());
  EXPECT_FALSE(second_.call_of(1, 2).has_value());
}

TEST_F(GroupBoardTest, WaitsForACallAsLongAsItIsTold) {
  EXPECT_FALSE(second_.call_of(0, 1, Deadline::after(std::chrono::milliseconds(1))).has_value());
}

TEST_F(GroupBoardTest, ShowsWhoHasLeft) {
  second_.publish_leaving(12);
  EXPECT_EQ(first_.last_operation_of(1), 12u);
  EXPECT_FALSE(first_.last_operation_of(0).has_value());
}

TEST_F(GroupBoardTest, HasRoomForFurtherKeys) {
  first_.publish("/id", "value");
  EXPECT_EQ(second_.look("/id"), "value");
  EXPECT_EQ(second_.await("/id", soon()), "value");
  EXPECT_THROW(second_.await("/other", Deadline::after(std::chrono::milliseconds(1))), Timeout);
}

TEST(GroupBoardOnABrokenStore, NeitherThrowsWhenThereIsNobodyToTellNorHidesWhyItCannotRead) {
  GroupBoard board(std::make_shared<BrokenStore>(), "group", 0);
  board.publish_failure({false, 1, "lost"});
  board.publish_leaving(1);
  EXPECT_THROW(board.failure(), std::runtime_error);
  EXPECT_THROW(board.publish_call(1, CallRecord{CallKind::kBarrier}), std::runtime_error);
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
