#include "core/comm/shm/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::soon;
using ::testing::ThrowsMessage;

Deadline passed() {
  return Deadline::after(std::chrono::milliseconds(0));
}

// Runs `body` on each of `size` thread ranks.
template <class Body>
void run_groups(int size, const Body& body) {
  testing::run_threads(size, [&](Store& store, int rank) {
    Group group(store, rank, size, 256, soon(), {});
    body(group);
  });
}

Operation broadcast_of(std::uint64_t count) {
  Operation operation{OperationKind::kBroadcast, DType::kFloat32};
  operation.root = 0;
  operation.count = count;
  return operation;
}

// One operation that only compares descriptions.
void compare(Group& group, const Operation& operation) {
  group.run(operation, [&] {
    group.announce();
    group.await_announcements(soon());
  });
}

void meet(Group& group) {
  compare(group, {OperationKind::kBarrier});
}

// Makes `rank` wait, outside the group, until `flag` is set.
void await(const std::atomic<bool>& flag) {
  while (!flag) {
    std::this_thread::yield();
  }
}

TEST(Groups, NumberTheirOperationsFromOne) {
  run_groups(3, [](Group& group) {
    EXPECT_EQ(group.size(), 3);
    for (std::uint64_t sequence = 1; sequence <= 50; ++sequence) {
      EXPECT_EQ(group.next_sequence(), sequence);
      meet(group);
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_GE(group.control(rank).announced.load(), 50u);
    }
    meet(group);
  });
}

TEST(Groups, ShowEveryRankWhereTheOperandsOfTheOthersLie) {
  run_groups(3, [](Group& group) {
    for (std::uint32_t round = 0; round < 20; ++round) {
      Operation operation = broadcast_of(10);
      operation.in_arena = true;
      operation.segment = round;
      operation.offset_bytes = 100u * static_cast<std::uint64_t>(group.rank());
      group.run(operation, [&] {
        group.announce();
        group.await_announcements(soon());
        for (int rank = 0; rank < 3; ++rank) {
          EXPECT_EQ(group.announced(rank).segment, round);
          EXPECT_EQ(group.announced(rank).offset_bytes, 100u * static_cast<std::uint64_t>(rank));
        }
      });
    }
  });
}

TEST(Groups, ShareTheMemoryBehindEachControlBlock) {
  run_groups(3, [](Group& group) {
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(group.extra(rank)) % 4096, 0u);
    }
    std::byte* const own = group.extra(group.rank());
    EXPECT_TRUE(std::all_of(own, own + 256, [](std::byte byte) { return byte == std::byte{0}; }));
    std::memset(own, group.rank() + 1, 256);
    meet(group);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(group.extra(rank)[0], static_cast<std::byte>(rank + 1));
      EXPECT_EQ(group.extra(rank)[255], static_cast<std::byte>(rank + 1));
    }
    EXPECT_EQ(&group.own(), &group.control(group.rank()));
    meet(group);
  });
}

TEST(Groups, TellEveryRankWhyOneFailed) {
  run_groups(3, [](Group& group) {
    if (group.rank() == 1) {
      EXPECT_THROW(group.run(broadcast_of(4), [] { throw std::runtime_error("the disk is full"); }),
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

TEST(Groups, TellEveryRankOfAFailureThatIsNoStandardException) {
  struct Interrupted {};
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      EXPECT_THROW(group.run(broadcast_of(4), [] { throw Interrupted(); }), Interrupted);
    } else {
      EXPECT_THAT([&] { meet(group); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("rank 1 failed"), HasSubstr("broadcast of 4 float32"))));
    }
  });
}

TEST(Groups, KeepTheFirstReason) {
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      group.abort("the first reason");
      group.abort("the second reason");
    }
    EXPECT_THAT([&] { meet(group); },
                ThrowsMessage<PeerLost>(AllOf(HasSubstr("the first reason"), Not(HasSubstr("the second reason")))));
  });
}

TEST(Groups, CutAReasonThatIsTooLong) {
  run_groups(2, [](Group& group) {
    if (group.rank() == 1) {
      group.abort("it began well" + std::string(10 * kFailureBytes, 'x'));
    }
    EXPECT_THAT([&] { meet(group); }, ThrowsMessage<PeerLost>(HasSubstr("it began well")));
    EXPECT_LT(std::strlen(group.control(1).failure), kFailureBytes);
  });
}

TEST(Groups, ListWhatEveryRankCalledWhenOperationsDifferAndStayUsable) {
  run_groups(3, [](Group& group) {
    meet(group);
    for (std::uint64_t round = 0; round < 10; ++round) {
      EXPECT_THAT([&] { compare(group, group.rank() == 1 ? broadcast_of(round) : Operation{OperationKind::kBarrier}); },
                  ThrowsMessage<MismatchedCollective>(
                      AllOf(HasSubstr("operation #" + std::to_string(2 + 2 * round)), HasSubstr("rank 0: barrier"),
                            HasSubstr("rank 1: broadcast of " + std::to_string(round) + " float32, root 0"),
                            HasSubstr("rank 2: barrier"))));
      meet(group);
    }
  });
}

TEST(Groups, SayThatARankHasLeft) {
  run_groups(2, [](Group& group) {
    meet(group);
    if (group.rank() == 0) {
      EXPECT_THAT([&] { meet(group); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("rank 1 has left"), HasSubstr("operation #2) on rank 0"))));
    }
  });
}

TEST(Groups, FinishAnOperationThatAPeerHasLeftAfter) {
  for (int round = 0; round < 30; ++round) {
    run_groups(4, [](Group& group) { meet(group); });
  }
}

TEST(Groups, MayBeLeftAsSoonAsTheyHaveBeenEntered) {
  for (int round = 0; round < 50 && !HasFailure(); ++round) {
    run_groups(4, [](Group& group) { EXPECT_EQ(group.next_sequence(), 1u); });
  }
}

TEST(Groups, TimeOutNamingTheRankAndWhatItReached) {
  std::atomic<bool> done{false};
  run_groups(2, [&](Group& group) {
    meet(group);
    if (group.rank() == 0) {
      EXPECT_THAT(
          [&] {
            group.run(broadcast_of(4), [&] {
              group.announce();
              group.await_announcements(passed());
            });
          },
          ThrowsMessage<Timeout>(
              AllOf(HasSubstr("broadcast of 4 float32, root 0 (operation #2) on rank 0 waited for rank 1"),
                    HasSubstr("the last operation it reached is #1"))));
      done = true;
    }
    await(done);
  });
}

TEST(Groups, WaitForASegmentThatIsStillToBeMade) {
  std::atomic<bool> waited{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    std::atomic<bool> armed{false};
    Group group(store, rank, 2, 0, soon(), [&] { waited = waited || armed; });
    if (rank == 0) {
      armed = true;
      group.peer_segment(1, 1, soon())->data()[0] = std::byte{5};
      meet(group);
    } else {
      await(waited);  // rank 0 has looked for the segment in vain
      const OwnedBlock block(group.arena(), 1);
      meet(group);
      EXPECT_EQ(block.segment()->data()[0], std::byte{5});
    }
  });
}

TEST(Groups, DoNotWaitForeverForASegment) {
  std::atomic<bool> done{false};
  run_groups(2, [&](Group& group) {
    if (group.rank() == 0) {
      EXPECT_THAT([&] { group.peer_segment(1, 7, passed()); }, ThrowsMessage<Timeout>(HasSubstr("rank 1")));
      done = true;
    }
    await(done);
  });
}

TEST(Groups, DoNotWaitForASegmentOfARankThatHasEnded) {
  run_groups(2, [](Group& group) {
    meet(group);
    if (group.rank() == 0) {
      EXPECT_THAT([&] { group.peer_segment(1, 7, soon()); }, ThrowsMessage<PeerLost>(HasSubstr("rank 1 has ended")));
    }
  });
}

TEST(Groups, StopWaitingWhenTheProbeThrowsAndTellThePeers) {
  struct Interrupted {};
  std::atomic<bool> done{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    std::atomic<bool> armed{false};
    Group group(store, rank, 2, 0, soon(), [&] {
      if (armed) {
        throw Interrupted();
      }
    });
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

TEST(Groups, RunOneOperationAtATimeHoweverManyThreadsCall) {
  run_groups(2, [](Group& group) {
    std::atomic<int> inside{0};
    std::vector<std::thread> callers;
    for (int t = 0; t < 3; ++t) {
      callers.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          group.run({OperationKind::kBarrier}, [&] {
            EXPECT_EQ(++inside, 1);
            group.announce();
            group.await_announcements(soon());
            --inside;
          });
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    EXPECT_EQ(group.next_sequence(), 151u);
  });
}

TEST(Groups, AreNotDisturbedByAForkedChild) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  testing::run_processes(2, [](Store& store, int rank) {
    auto group = std::make_unique<Group>(store, rank, 2, 0, soon(), InterruptProbe());
    const pid_t child = ::fork();
    if (child == 0) {
      group->abort("the child failed");
      group.reset();
      ::_exit(0);
    }
    EXPECT_EQ(testing::wait_process(child), 0);
    EXPECT_EQ(group->own().state.load(), RankState::kRunning);
    meet(*group);
  });
}

TEST(Groups, CanBeMadeAnewInAForkedChildThatDropsTheInheritedOne) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  testing::run_processes(3, [&](Store& store, int rank) {
    auto inherited = std::make_unique<Group>(store, rank, 3, 0, soon(), InterruptProbe());
    const pid_t child = testing::start_process(folder, rank, [&](Store& other, int) {
      Group own(other, rank, 3, 0, soon(), {});
      inherited.reset();
      meet(own);
      own.arena()->poll();
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_TRUE(peer == rank || !own.arena()->peer_closed(peer)) << "rank " << peer << " seen from " << rank;
      }
      meet(own);
    });
    EXPECT_EQ(testing::wait_process(child), 0);
    meet(*inherited);
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace accelerate_cpp::comm
