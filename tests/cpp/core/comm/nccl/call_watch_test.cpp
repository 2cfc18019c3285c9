#include "core/comm/nccl/call_watch.h"

#include <memory>
#include <stdexcept>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CallRecord all_reduce_of(std::uint64_t count) {
  CallRecord record{CallKind::kAllReduce, DType::kFloat32};
  record.count = count;
  return record;
}

// Rank 0 of 3 waits in operation 5; the others are played by what they write on the board.
class CallWatchTest : public OnDoubles {
 protected:
  CallWatchTest() {
    options_.stall_after = std::chrono::milliseconds(0);
    options_.hooks.call_site = [] { return std::string("train.py:88"); };
  }

  NcclGroup& group() {
    if (group_ == nullptr) {
      group_ = std::make_unique<NcclGroup>(context(), GroupBoard(store_, "group", 0), options_, 0, 3);
    }
    return *group_;
  }
  GroupBoard board_of(int rank) { return GroupBoard(store_, "group", rank); }
  CallWatch watch(Deadline deadline = soon()) { return CallWatch(group(), all_reduce_of(10), 5, deadline); }

  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  NcclOptions options_ = options(0);
  std::unique_ptr<NcclGroup> group_;
};

TEST_F(CallWatchTest, TellsTheOthersWhatItWaitsForAndWhere) {
  watch().pause();
  const auto call = board_of(1).call_of(0, 5);
  ASSERT_TRUE(call.has_value());
  EXPECT_EQ(call->count, 10u);
  EXPECT_EQ(call->location, "train.py:88");
}

TEST_F(CallWatchTest, TellsNobodyAnythingWhileTheWaitIsShort) {
  options_.stall_after = std::chrono::hours(1);
  watch().pause();
  EXPECT_FALSE(board_of(1).call_of(0, 5).has_value());
}

TEST_F(CallWatchTest, GoesOnWaitingWhileTheOthersAgree) {
  board_of(1).publish_call(5, all_reduce_of(10));
  CallWatch waiting = watch();
  EXPECT_NO_THROW(waiting.pause());
  EXPECT_NO_THROW(waiting.pause());
}

TEST_F(CallWatchTest, RaisesWhenAnotherRankAsksForSomethingElse) {
  CallRecord other = all_reduce_of(11);
  other.location = "train.py:99";
  board_of(2).publish_call(5, other);
  EXPECT_THAT(message_of<MismatchedCollective>([&] { watch().pause(); }),
              AllOf(HasSubstr("operation 5"), HasSubstr("rank 0 and rank 2 ask for different operations"),
                    HasSubstr("rank 0: all_reduce(sum) of 10 float32 at train.py:88"), HasSubstr("rank 1: not known"),
                    HasSubstr("rank 2: all_reduce(sum) of 11 float32 at train.py:99")));
}

TEST_F(CallWatchTest, DoesNotCompareDifferentOperations) {
  board_of(2).publish_call(4, all_reduce_of(11));
  EXPECT_NO_THROW(watch().pause());
}

TEST_F(CallWatchTest, RaisesTheMismatchThatAnotherRankFoundInTheSameOperation) {
  board_of(1).publish_failure({true, 5, "they disagree"});
  EXPECT_THAT(message_of<MismatchedCollective>([&] { watch().pause(); }), HasSubstr("they disagree"));
  EXPECT_TRUE(group().failure().has_value());
}

TEST_F(CallWatchTest, TakesAMismatchInAnEarlierOperationForALostPeer) {
  board_of(1).publish_failure({true, 4, "they disagree"});
  EXPECT_THAT(message_of<PeerLost>([&] { watch().pause(); }), HasSubstr("they disagree"));
}

TEST_F(CallWatchTest, RaisesWhenAnotherRankHasFailed) {
  board_of(1).publish_failure({false, 5, "rank 1 is out of memory"});
  EXPECT_THAT(message_of<PeerLost>([&] { watch().pause(); }),
              AllOf(HasSubstr("all_reduce(sum) of 10 float32 (operation 5) on rank 0 of 3 (cuda:0)"),
                    HasSubstr("rank 1 is out of memory")));
}

TEST_F(CallWatchTest, DoesNotBlameTheCallOfARankThatHasFailedInIt) {
  board_of(1).publish_call(5, all_reduce_of(11));
  board_of(1).publish_failure({false, 5, "rank 1 is out of memory"});
  EXPECT_THAT(message_of<PeerLost>([&] { watch().pause(); }), HasSubstr("rank 1 is out of memory"));
}

TEST_F(CallWatchTest, RaisesWhenThisRankFailedMeanwhile) {
  options_.stall_after = std::chrono::hours(1);
  CallWatch waiting = watch();
  group().fail({false, 0, "aborted by hand"});
  EXPECT_THAT(message_of<PeerLost>([&] { waiting.pause(); }), HasSubstr("aborted by hand"));
}

TEST_F(CallWatchTest, RaisesWhenARankHasLeftBefore) {
  board_of(2).publish_leaving(4);
  EXPECT_THAT(message_of<PeerLost>([&] { watch().pause(); }), HasSubstr("rank 2 has left the group after operation 4"));
}

TEST_F(CallWatchTest, WaitsForDataOfARankThatLeftAfterTheOperation) {
  board_of(2).publish_leaving(5);
  EXPECT_NO_THROW(watch().pause());
}

TEST_F(CallWatchTest, SaysAtTheDeadlineWhoIsNotKnownToWait) {
  board_of(2).publish_call(5, all_reduce_of(10));
  EXPECT_THAT(message_of<Timeout>([&] { watch(Deadline::after(std::chrono::milliseconds(0))).pause(); }),
              AllOf(HasSubstr("(operation 5) on rank 0 of 3 (cuda:0) had not finished after"),
                    HasSubstr("rank 1: not known to wait"), HasSubstr("rank 2: all_reduce")));
}

TEST_F(CallWatchTest, LooksOnceMoreBeforeItGivesUp) {
  options_.stall_after = std::chrono::hours(1);
  board_of(1).publish_failure({false, 5, "rank 1 is out of memory"});
  EXPECT_THROW(watch(Deadline::after(std::chrono::milliseconds(0))).pause(), PeerLost);
}

TEST_F(CallWatchTest, WarnsOnceWhenTheWaitIsLong) {
  std::vector<std::string> warnings;
  options_.hooks.warn_after = std::chrono::milliseconds(1);
  options_.hooks.warn = [&](const std::string& text) { warnings.push_back(text); };
  CallWatch waiting = watch();
  while (warnings.empty()) {
    waiting.pause();
  }
  waiting.pause();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0],
              AllOf(HasSubstr("operation 5"), HasSubstr("goes on waiting"), HasSubstr("rank 2: not known to wait")));
}

TEST_F(CallWatchTest, LetsTheUserInterrupt) {
  options_.hooks.probe = [] { throw std::runtime_error("Ctrl-C"); };
  CallWatch waiting = watch();
  EXPECT_THROW(while (true) { waiting.pause(); }, std::runtime_error);
}

TEST_F(CallWatchTest, ExplainsAMismatchWithTheCallsOfAll) {
  board_of(1).publish_call(5, all_reduce_of(10));
  board_of(2).publish_call(5, all_reduce_of(11));
  EXPECT_THAT(watch().explain_mismatch(),
              AllOf(HasSubstr("rank 0 and rank 2 ask for different operations"), Not(HasSubstr("not known"))));
  EXPECT_TRUE(board_of(1).call_of(0, 5).has_value());
}

TEST_F(CallWatchTest, ExplainsAMismatchAlsoWithoutTheOthers) {
  EXPECT_THAT(watch(Deadline::after(std::chrono::milliseconds(1))).explain_mismatch(),
              AllOf(HasSubstr("do not fit together"), HasSubstr("rank 2: not known")));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
