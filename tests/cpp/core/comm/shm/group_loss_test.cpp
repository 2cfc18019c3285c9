// A Group of which one rank fails, leaves or stops: what the others are told, whatever they are doing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::broadcast_of;
using testing::compare;
using ::testing::HasSubstr;
using testing::meet;
using ::testing::Not;
using testing::run_groups;
using testing::soon;
using ::testing::ThrowsMessage;

TEST(GroupsThatFail, TellEveryRankWhyOneFailed) {
  run_groups(3, [](Group& group) {
    if (group.rank() == 1) {
      EXPECT_THROW(group.run(broadcast_of(4), soon(), [] { throw std::runtime_error("the disk is full"); }),
                   std::runtime_error);
    } else {
      EXPECT_THAT([&] { meet(group); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("barrier"), HasSubstr("the disk is full"))));
    }
    EXPECT_THAT([&] { compare(group, broadcast_of(9)); },
                ThrowsMessage<PeerLost>(AllOf(HasSubstr("broadcast of 9 float32"), HasSubstr("the disk is full"))))
        << "and stay unusable";
  });
}

TEST(GroupsThatFail, TellEveryRankOfAFailureThatIsNoStandardException) {
  struct Interrupted {};
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      EXPECT_THROW(group.run(broadcast_of(4), soon(), [] { throw Interrupted(); }), Interrupted);
    } else {
      EXPECT_THAT([&] { meet(group); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("rank 1 failed"), HasSubstr("broadcast of 4 float32"))));
    }
  });
}

TEST(GroupsThatFail, KeepTheFirstReason) {
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      group.abort("the first reason");
      group.abort("the second reason");
    }
    EXPECT_THAT([&] { meet(group); },
                ThrowsMessage<PeerLost>(AllOf(HasSubstr("the first reason"), Not(HasSubstr("the second reason")))));
  });
}

TEST(GroupsThatFail, CutAReasonThatIsTooLong) {
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      group.abort("it began well" + std::string(10 * RankControl::kFailureBytes, 'x'));
    }
    EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerLost>(HasSubstr("it began well")));
    EXPECT_LT(std::strlen(group.control(1).failure), RankControl::kFailureBytes);
  });
}

TEST(GroupsThatFail, StopWaitingWhenTheProbeThrowsAndTellThePeers) {
  struct Interrupted {};
  std::atomic<bool> done{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    std::atomic<bool> armed{false};
    const auto probe = [&] {
      if (armed) {
        throw Interrupted();
      }
    };
    Group group(store, rank, 2, 0, soon(), WaitHooks{probe});
    if (rank == 0) {
      armed = true;
      EXPECT_THROW(meet(group), Interrupted);
      done = true;
    } else {
      await(done);
      EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerLost>(HasSubstr("rank 0 failed")));
    }
  });
}

TEST(GroupsThatFail, StopWaitingWhenTheirOwnRankAborts) {
  std::atomic<bool> formed{false};
  std::atomic<bool> waits{false};
  std::atomic<bool> done{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    Group group(store, rank, 2, 0, soon(), WaitHooks{[&] { waits = waits || formed; }});
    if (rank == 0) {
      formed = true;
      std::thread watchdog([&] {
        await(waits);
        group.abort("the watchdog barked");
      });
      EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerLost>(HasSubstr("the watchdog barked")));
      watchdog.join();
      done = true;
    }
    await(done);
  });
}

TEST(GroupsThatFail, KnowThatNobodyIsLostWhileAllRun) {
  run_groups(2, [](Group& group) {
    EXPECT_FALSE(group.loss_of(1 - group.rank(), false));
    EXPECT_FALSE(group.loss_of(1 - group.rank(), true));
    meet(group);
  });
}

// `lose` makes rank 2 unusable while rank 1 stays away; `told` is what rank 0, which waits for all, must hear.
template <class Lose>
void expect_told_while_another_rank_is_late(const std::string& told, const Lose& lose) {
  std::atomic<bool> done{false};
  testing::run_threads(3, [&](Store& store, int rank) {
    auto group = std::make_unique<Group>(store, rank, 3, 0, soon(), WaitHooks());
    if (rank == 0) {
      EXPECT_THAT([&] { meet(*group); }, ThrowsMessage<PeerLost>(HasSubstr(told)));
      done = true;
    } else if (rank == 2) {
      lose(group);
    }
    await(done);
  });
}

TEST(GroupsThatFail, TellOfAnAbortAlsoARankThatWaitsForAnother) {
  expect_told_while_another_rank_is_late("the disk is full", [](auto& group) { group->abort("the disk is full"); });
}

TEST(GroupsThatFail, TellOfARankThatLeftAlsoARankThatWaitsForAnother) {
  expect_told_while_another_rank_is_late("rank 2 has left", [](auto& group) { group.reset(); });
}

}  // namespace
}  // namespace accelerate_cpp::comm
