// What a Group says when ranks differ, wait for each other, or are gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::compare;
using ::testing::HasSubstr;
using testing::meet;
using testing::message_of;
using ::testing::Not;
using testing::passed;
using testing::run_groups;
using testing::run_groups_with;
using testing::soon;
using ::testing::ThrowsMessage;

Operation all_reduce_of(std::uint64_t count) {
  Operation operation{{CallKind::kAllReduce, DType::kFloat32}};
  operation.signature.count = count;
  return operation;
}

TEST(GroupReports, ShowOnEveryRankWhatEachCalledAndWhere) {
  run_groups(3, [](Group& group) {
    meet(group, soon());
    const bool other = group.rank() == 1;
    const Shape shape = other ? Shape{5, 2} : Shape{2, 5};
    const std::string place = "train.py:8" + std::to_string(group.rank());
    EXPECT_THAT([&] { compare(group, all_reduce_of(10), Call(soon(), shape, place)); },
                ThrowsMessage<MismatchedCollective>(AllOf(
                    HasSubstr("operation #2"), HasSubstr("rank 0: all_reduce(sum) of [2, 5] float32 at train.py:80"),
                    HasSubstr("rank 1: all_reduce(sum) of [5, 2] float32 at train.py:81"),
                    HasSubstr("rank 2: all_reduce(sum) of [2, 5] float32 at train.py:82"))));
  });
}

TEST(GroupReports, NameACallAsTheProgramDid) {
  run_groups(2, [](Group& group) {
    const std::string place = group.rank() == 0 ? "reduce of a tensor\ttrain.py:80" : "train.py:81";
    const std::string message = message_of<MismatchedCollective>(
        [&] { compare(group, all_reduce_of(group.rank() == 0 ? 3 : 4), Call(soon(), {}, place)); });
    EXPECT_THAT(message, AllOf(HasSubstr("\n  rank 0: reduce of a tensor at train.py:80\n"),
                               HasSubstr("\n  rank 1: all_reduce(sum) of 4 float32 at train.py:81\n")));
  });
}

TEST(GroupReports, AskForThePlaceOfACallThatBroughtNoneOnlyOnceItIsNeeded) {
  std::atomic<int> asked{0};
  const auto hooks = [&](int rank) {
    WaitHooks result;
    result.call_site = [&asked, rank] {
      ++asked;
      return "model.py:" + std::to_string(rank);
    };
    result.warn_after = std::chrono::hours(1);
    return result;
  };
  run_groups_with(hooks, 2, 0, [](Group& group) {
    const std::string message = message_of<MismatchedCollective>(
        [&] { compare(group, all_reduce_of(static_cast<std::uint64_t>(group.rank())), soon()); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0: all_reduce(sum) of 0 float32 at model.py:0"),
                               HasSubstr("rank 1: all_reduce(sum) of 1 float32 at model.py:1")));
  });
  EXPECT_EQ(asked, 2) << "each rank names its own place once";
}

TEST(GroupReports, LeaveOutAPlaceThatIsNotKnown) {
  run_groups(2, [](Group& group) {
    const std::string_view place = group.rank() == 1 ? "train.py:7" : "";
    EXPECT_THAT(
        [&] { compare(group, all_reduce_of(group.rank() == 0 ? 3 : 4), Call(soon(), {}, place)); },
        ThrowsMessage<MismatchedCollective>(AllOf(HasSubstr("rank 0: all_reduce(sum) of 3 float32\n"),
                                                  HasSubstr("rank 1: all_reduce(sum) of 4 float32 at train.py:7\n"))));
  });
}

TEST(GroupReports, CutAPlaceThatIsTooLong) {
  run_groups(2, [](Group& group) {
    const std::string place = "here" + std::string(10 * Place::kBytes, 'x');
    const std::string message = message_of<MismatchedCollective>(
        [&] { compare(group, all_reduce_of(static_cast<std::uint64_t>(group.rank())), Call(soon(), {}, place)); });
    EXPECT_THAT(message, HasSubstr("rank 1: all_reduce(sum) of 1 float32 at herex"));
    EXPECT_LT(message.size(), 4 * Place::kBytes);
  });
}

TEST(GroupReports, TellTheSameTableOnEveryRankAndAnotherOneForEachMismatch) {
  std::vector<std::string> tables[2];
  run_groups(2, [&](Group& group) {
    for (std::uint64_t round = 0; round < 6; ++round) {
      const std::string place = "round " + std::to_string(round) + " of rank " + std::to_string(group.rank());
      const Operation operation = group.rank() == 0 ? all_reduce_of(round) : Operation{{CallKind::kBarrier}};
      tables[group.rank()].push_back(
          message_of<MismatchedCollective>([&] { compare(group, operation, Call(soon(), {}, place)); }));
      EXPECT_THAT(tables[group.rank()].back(),
                  AllOf(HasSubstr("operation #" + std::to_string(round + 1) + ":"),
                        HasSubstr("rank 0: all_reduce(sum) of " + std::to_string(round) + " float32 at round " +
                                  std::to_string(round) + " of rank 0"),
                        HasSubstr("rank 1: barrier at round " + std::to_string(round) + " of rank 1")));
    }
    meet(group, soon());
  });
  EXPECT_EQ(tables[0], tables[1]);
}

TEST(GroupReports, ListTheCountsThatDoNotFit) {
  run_groups(2, [](Group& group) {
    Operation operation{{CallKind::kAllToAll, DType::kInt8}};
    operation.has_counts = true;
    operation.signature.count = 3;
    const auto call = [&] {
      group.run(operation, soon(), [&] {
        group.set_counts({1, 2},
                         group.rank() == 0 ? std::vector<std::uint64_t>{1, 7} : std::vector<std::uint64_t>{2, 2});
        group.announce();
        group.await_announcements(soon());
      });
    };
    EXPECT_THAT(call, ThrowsMessage<MismatchedCollective>(
                          AllOf(HasSubstr("rank 0: all_to_all of 3 int8, gives [1, 2] and expects [1, 7] elements"),
                                HasSubstr("rank 1: all_to_all of 3 int8, gives [1, 2] and expects [2, 2] elements"))));
  });
}

TEST(GroupReports, SayOnTimeoutWhoWaitedForWhomAndWhereEveryoneIs) {
  std::atomic<int> looks{0};
  std::atomic<bool> formed{false};
  std::atomic<bool> rank_0_stalls{false};
  std::atomic<bool> done{false};
  const auto hooks = [&](int rank) {
    WaitHooks result;
    result.probe = [&, rank] {
      looks += formed && rank == 0 ? 1 : 0;
      rank_0_stalls = rank_0_stalls || looks >= 2;  // after the first look it has published its place
    };
    return result;
  };
  run_groups_with(hooks, 3, 0, [&](Group& group) {
    meet(group, soon());
    formed = true;
    if (group.rank() == 0) {
      EXPECT_THROW(compare(group, all_reduce_of(4), Call(soon(), {4}, "train.py:10")), PeerLost);
      done = true;
    } else if (group.rank() == 1) {
      await(rank_0_stalls);
      EXPECT_THAT(
          [&] { compare(group, all_reduce_of(4), Call(passed(), {4}, "train.py:11")); },
          ThrowsMessage<Timeout>(AllOf(
              HasSubstr("all_reduce(sum) of [4] float32 (operation #2) at train.py:11 on rank 1 waited for rank 2"),
              HasSubstr("\n  rank 0 last reached operation #2 (all_reduce(sum) of [4] float32) at train.py:10"),
              HasSubstr("\n  rank 1 last reached operation #2 (all_reduce(sum) of [4] float32) at train.py:11"),
              HasSubstr("\n  rank 2 last reached operation #1 (barrier)"))));
    }
    await(done);
  });
}

TEST(GroupReports, SayThatARankHasNotCalledAnythingYet) {
  std::atomic<bool> done{false};
  run_groups(2, [&](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THAT([&] { meet(group, passed()); },
                  ThrowsMessage<Timeout>(HasSubstr("rank 1 has not called a collective of this group")));
      done = true;
    }
    await(done);
  });
}

TEST(GroupReports, SayWhereEveryoneIsWhenARankHasLeft) {
  run_groups(3, [](Group& group) {
    meet(group, soon());
    if (group.rank() != 1) {
      EXPECT_THAT([&] { compare(group, all_reduce_of(9), soon()); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("all_reduce(sum) of 9 float32 (operation #2)"),
                                                HasSubstr("on rank " + std::to_string(group.rank())),
                                                HasSubstr("rank 1 has left"),
                                                HasSubstr("\n  rank 1 last reached operation #1 (barrier)"))));
    }
  });
}

TEST(GroupReports, SayWhereEveryoneIsWhenARankHasEnded) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  const pid_t victim = testing::start_process(folder, 1, [](Store& store, int rank) {
    Group group(store, rank, 2, 0, soon(), {});
    meet(group, soon());
    ::raise(SIGKILL);
  });
  const pid_t survivor = testing::start_process(folder, 0, [](Store& store, int rank) {
    Group group(store, rank, 2, 0, soon(), {});
    meet(group, soon());
    EXPECT_THAT(
        [&] { meet(group, Call(soon(), {}, "train.py:5")); },
        ThrowsMessage<PeerLost>(AllOf(HasSubstr("barrier (operation #2) at train.py:5 on rank 0 waited for rank 1"),
                                      HasSubstr("rank 1 has ended"),
                                      HasSubstr("\n  rank 0 last reached operation #2 (barrier) at train.py:5"),
                                      HasSubstr("\n  rank 1 last reached operation #1 (barrier)"))));
  });
  EXPECT_EQ(testing::wait_process(victim), -SIGKILL);
  EXPECT_EQ(testing::wait_process(survivor), 0);
  std::filesystem::remove_all(folder);
}

// Rank 0 waits `waits` times, each time until it has looked around often; returns what it was told to warn of.
std::vector<std::string> warnings_of_long_waits(int waits, std::chrono::milliseconds warn_after) {
  std::vector<std::string> warnings;
  std::atomic<int> looks{0};
  std::atomic<bool> armed{false};
  const auto hooks = [&](int rank) {
    WaitHooks result;
    if (rank == 0) {
      result.probe = [&] { looks += armed ? 1 : 0; };
      result.warn = [&](const std::string& sentence) {
        if (armed) {
          warnings.push_back(sentence);
        }
      };
    }
    result.warn_after = warn_after;
    return result;
  };
  run_groups_with(hooks, 2, 0, [&](Group& group) {
    for (int wait = 0; wait < waits; ++wait) {
      meet(group, soon());
      if (group.rank() == 0) {
        armed = true;
        compare(group, all_reduce_of(7), Call(soon(), {}, "train.py:10"));
        armed = false;
        looks = 0;
      } else {
        while (looks < 4) {
          std::this_thread::yield();
        }
        compare(group, all_reduce_of(7), soon());
      }
    }
  });
  return warnings;
}

TEST(GroupReports, WarnOnceOfEachLongWait) {
  std::vector<std::string> warnings = warnings_of_long_waits(3, std::chrono::milliseconds(0));
  ASSERT_EQ(warnings.size(), 3u);
  for (std::size_t wait = 0; wait < 3; ++wait) {
    const std::string number = std::to_string(2 * wait + 2);
    const std::string before = std::to_string(2 * wait + 1);
    EXPECT_THAT(warnings[wait], AllOf(HasSubstr("all_reduce(sum) of 7 float32 (operation #" + number +
                                                ") at train.py:10 on rank 0 waited for rank 1"),
                                      HasSubstr("\n  rank 0 last reached operation #" + number),
                                      HasSubstr("\n  rank 1 last reached operation #" + before + " (barrier)")));
  }
}

TEST(GroupReports, DoNotWarnBeforeAWaitHasLastedLongEnough) {
  EXPECT_TRUE(warnings_of_long_waits(1, std::chrono::hours(1)).empty());
}

TEST(GroupReports, NameNoPlaceOfAnEarlierOperation) {
  run_groups(2, [](Group& group) {
    const std::string_view place = "old.py:1";
    EXPECT_THROW(compare(group, all_reduce_of(group.rank() == 0 ? 3 : 4), Call(soon(), {}, place)),
                 MismatchedCollective);
    meet(group, soon());
    EXPECT_THAT([&] { compare(group, all_reduce_of(group.rank() == 0 ? 3 : 4), soon()); },
                ThrowsMessage<MismatchedCollective>(AllOf(HasSubstr("operation #3"), Not(HasSubstr("old.py")))))
        << "it lies where that of operation #1 lay";
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
