#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/comm/shm/engines.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::broadcast_of;
using testing::compare;
using testing::Engine;
using ::testing::HasSubstr;
using testing::Integers;
using testing::passed;
using testing::run_engines;
using testing::run_groups;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr int kRounds = 100;

std::vector<int> meet(Group& group, const std::string& topic = "save") {
  return group.meet(topic, soon());
}

void barrier(Group& group) {
  testing::meet(group);
}

std::vector<int> ranks(std::initializer_list<int> list) {
  return list;
}

TEST(Meetings, TellAllRanksThatAllAreThere) {
  run_groups(3, [](Group& group) {
    for (int round = 0; round < kRounds; ++round) {
      EXPECT_EQ(meet(group), ranks({0, 1, 2}));
      if (round % 2 == 1) {
        barrier(group);
      }
    }
  });
}

TEST(Meetings, EndForARankAloneWhereTheOthersAreInAnOperationWhichGoesOnUndisturbed) {
  run_groups(3, [](Group& group) {
    for (int round = 0; round < kRounds; ++round) {
      if (group.rank() == round % 3) {
        EXPECT_EQ(meet(group), ranks({group.rank()}));
      }
      compare(group, broadcast_of(static_cast<std::uint64_t>(round)));
      EXPECT_EQ(group.interruptions(), 0u);
      EXPECT_EQ(group.next_sequence(), static_cast<std::uint64_t>(round) + 2);
    }
  });
}

TEST(Meetings, TellThoseThatAreThereAlikeWhoIs) {
  run_groups(4, [](Group& group) {
    for (int round = 0; round < kRounds; ++round) {
      std::mt19937 random(static_cast<unsigned>(round));
      std::vector<int> expected;
      for (int rank = 0; rank < 4; ++rank) {
        if (random() % 2 == 0) {
          expected.push_back(rank);
        }
      }
      if (std::find(expected.begin(), expected.end(), group.rank()) != expected.end()) {
        EXPECT_EQ(meet(group), expected);
      }
      barrier(group);
    }
  });
}

TEST(Meetings, OnSeveralTopicsComeOneAfterAnother) {
  run_groups(3, [](Group& group) {
    for (int round = 0; round < kRounds; ++round) {
      if (group.rank() == 0) {
        EXPECT_EQ(meet(group, "mine"), ranks({0}));
      }
      EXPECT_EQ(meet(group, "ours"), ranks({0, 1, 2}));
      if (group.rank() == 1) {
        EXPECT_EQ(meet(group, "hers"), ranks({1}));
      }
      barrier(group);
    }
  });
}

TEST(Meetings, AreNotOfRanksThatHaveLeft) {
  run_groups(2, [](Group& group) {
    barrier(group);
    if (group.rank() == 1) {
      group.leave();
    } else {
      EXPECT_EQ(meet(group), ranks({0}));
    }
  });
}

TEST(Meetings, AreNotOfRanksThatWaitForAMessageOfOneThatIsThere) {
  run_engines(3, [](Engine& engine) {
    if (engine.rank() == 0) {
      EXPECT_EQ(meet(*engine.group), ranks({0}));
      testing::send(engine, 1, 7, Integers(3, 20));
    } else {  // rank 2 waits for one that waits
      testing::expect_message(engine, engine.rank() - 1, 7, 3, 20);
      if (engine.rank() == 1) {
        testing::send(engine, 2, 7, Integers(3, 20));
      }
    }
    barrier(*engine.group);
  });
}

TEST(Meetings, AreOfARankThatFirstWaitsForAMessageOfOneThatIsStillToCome) {
  run_engines(3, [](Engine& engine) {
    if (engine.rank() == 1) {
      testing::expect_message(engine, 2, 7, 3, 20);
    } else if (engine.rank() == 2) {
      while (engine.group->control(1).awaited_in_transfer.load() == RankControl::kNobody ||
             engine.group->control(0).meeting.load() == 0) {
        std::this_thread::yield();
      }
      testing::send(engine, 1, 7, Integers(3, 20));
    }
    EXPECT_EQ(meet(*engine.group), ranks({0, 1, 2}));
  });
}

TEST(Meetings, AreOfNobodyElseOnceTheGroupHasFailed) {
  std::atomic<bool> failed{false};
  run_groups(3, [&](Group& group) {
    barrier(group);
    if (group.rank() == 1) {
      group.abort("the disk is full");
      EXPECT_EQ(meet(group), ranks({1}));
      failed = true;
    } else if (group.rank() == 0) {
      await(failed);
      EXPECT_THROW(barrier(group), PeerLost);
      EXPECT_EQ(meet(group), ranks({0}));
    }
  });
}

TEST(Meetings, MissARankThatHasFailedAndThenKnowThatItWillNotCome) {
  run_groups(3, [](Group& group) {
    barrier(group);
    if (group.rank() == 2) {
      group.abort("its disk is full");
      return;
    }
    EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerLost>(HasSubstr("its disk is full")));
    EXPECT_EQ(meet(group), ranks({group.rank()}));
    EXPECT_THROW(barrier(group), PeerLost);
  });
}

TEST(Meetings, ThatAreInterruptedLeaveTheGroupAsItWas) {
  std::atomic<bool> interrupted{true};
  std::atomic<bool> meeting_over{false};
  const auto hooks = [&](int rank) {
    return WaitHooks{[rank, &interrupted] {
      if (rank == 0 && !interrupted) {
        throw std::runtime_error("interrupted");
      }
    }};
  };
  testing::run_groups_with(hooks, 2, 0, [&](Group& group) {
    barrier(group);
    if (group.rank() == 0) {
      interrupted = false;
      EXPECT_THROW(meet(group), std::runtime_error);
      EXPECT_EQ(group.own().meeting.load(), 0u);
      interrupted = true;
      meeting_over = true;
    } else {
      await(meeting_over);
    }
    EXPECT_EQ(meet(group), ranks({0, 1}));
    barrier(group);
  });
}

TEST(Meetings, SayWhereTheyWaitedInVainAndLeaveThePlaceOfTheNextOperationToIt) {
  std::atomic<bool> gave_up{false};
  run_groups(2, [&](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THAT([&] { group.meet("save", Call(passed(), {}, "train.py:7")); },
                  ThrowsMessage<Timeout>(AllOf(HasSubstr("meeting at train.py:7 on rank 0 waited for rank 1: "),
                                               HasSubstr("rank 1 has not called a collective of this group"))));
      gave_up = true;
    } else {
      await(gave_up);
    }
    const Operation own = group.rank() == 0 ? broadcast_of(3) : broadcast_of(4);
    EXPECT_THAT([&] { compare(group, own, Call(soon(), {}, "train.py:" + std::to_string(group.rank() + 20))); },
                ThrowsMessage<MismatchedCollective>(AllOf(HasSubstr("train.py:20"), HasSubstr("train.py:21"))));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
