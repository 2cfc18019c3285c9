// A Group from one of whose operations a rank withdraws: it ends there for all ranks, and the next ones work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::compare;
using ::testing::HasSubstr;
using testing::meet;
using testing::run_groups;
using testing::soon;
using ::testing::ThrowsMessage;

TEST(Withdrawals, EndOneOperationForAllRanksAndLeaveTheNextAlone) {
  run_groups(3, [](Group& group) {
    for (int time = 0; time < 4; ++time) {
      meet(group);
      if (group.rank() == time % 3) {
        group.withdraw("out of memory", soon());
      } else {
        EXPECT_THAT([&] { compare(group, testing::broadcast_of(4)); },
                    ThrowsMessage<PeerWithdrew>(
                        AllOf(HasSubstr("broadcast of 4 float32"), HasSubstr("withdrew"), HasSubstr("out of memory"))));
      }
      EXPECT_EQ(group.interruptions(), time + 1);
    }
    meet(group);
  });
}

TEST(Withdrawals, MayFollowOneAnotherFasterThanTheOtherRanksSeeThem) {
  std::atomic<bool> withdrawn{false};
  run_groups(2, [&](Group& group) {
    if (group.rank() == 0) {
      group.withdraw("first", soon());
      withdrawn = true;
      group.withdraw("second", soon());
      group.withdraw("third", soon());
    } else {
      await(withdrawn);
      for (const char* reason : {"first", "second", "third"}) {
        EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerWithdrew>(HasSubstr(reason)));
      }
    }
    meet(group);
  });
}

TEST(Withdrawals, OfAllRanksAtOnceAreOneInterruption) {
  run_groups(3, [](Group& group) {
    group.withdraw("we all had enough", soon());
    EXPECT_EQ(group.interruptions(), 1u);
    meet(group);
  });
}

TEST(Withdrawals, ReachARankThatWaitsForAnother) {
  std::atomic<bool> raised{false};
  run_groups(3, [&](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THROW(meet(group), PeerWithdrew);  // while it waits for rank 1
      raised = true;
    } else if (group.rank() == 2) {
      group.withdraw("out of memory", soon());
    } else {
      await(raised);
      EXPECT_THROW(meet(group), PeerWithdrew);
    }
    meet(group);
  });
}

TEST(Withdrawals, TakeTheErrorOfAnOperationThatAllowsThem) {
  run_groups(2, [](Group& group) {
    const auto wait_for_peer = [&] {
      group.announce();
      group.await_announcements(soon());
      group.set_may_withdraw(true);
      if (group.rank() == 1) {
        throw std::runtime_error("interrupted");
      }
      group.wait(1, soon(), [] { return false; });
    };
    if (group.rank() == 1) {
      EXPECT_THROW(group.run({{CallKind::kBarrier}}, soon(), wait_for_peer), std::runtime_error);
    } else {
      EXPECT_THAT([&] { group.run({{CallKind::kBarrier}}, soon(), wait_for_peer); },
                  ThrowsMessage<PeerWithdrew>(HasSubstr("interrupted")));
    }
    meet(group);
  });
}

TEST(Withdrawals, AreRefusedOnceTheGroupHasFailed) {
  run_groups(2, [](Group& group) {
    group.abort("the disk is full");
    EXPECT_THAT([&] { group.withdraw("out of memory", soon()); },
                ThrowsMessage<PeerLost>(HasSubstr("the disk is full")));
  });
}

TEST(Interruptions, AreMismatchesToo) {
  run_groups(2, [](Group& group) {
    EXPECT_THROW(compare(group, testing::broadcast_of(static_cast<std::uint64_t>(group.rank()))), MismatchedCollective);
    EXPECT_EQ(group.interruptions(), 1u);
    group.await_interruptions(soon());
    meet(group);
  });
}

TEST(Interruptions, AreAwaitedUntilAllRanksHaveSeenThem) {
  std::atomic<bool> may_see{false};
  std::atomic<bool> seen{false};
  run_groups(2, [&](Group& group) {
    if (group.rank() == 0) {
      group.withdraw("out of memory", soon());
      EXPECT_THROW(group.await_interruptions(testing::passed()), Timeout);
      may_see = true;
      group.await_interruptions(soon());
      EXPECT_TRUE(seen);
    } else {
      await(may_see);
      seen = true;
      EXPECT_THROW(meet(group), PeerWithdrew);
    }
  });
}

TEST(Interruptions, LetBodiesRunOnlyBetweenOperations) {
  run_groups(1, [](Group& group) {
    int runs = 0;
    group.try_between_operations([&] { ++runs; });
    group.run({{CallKind::kBarrier}}, soon(), [&] {
      std::thread([&] { group.try_between_operations([&] { ++runs; }); }).join();
      group.announce();
    });
    EXPECT_EQ(runs, 1);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
