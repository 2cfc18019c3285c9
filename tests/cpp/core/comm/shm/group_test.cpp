#include "core/comm/shm/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::broadcast_of;
using testing::compare;
using ::testing::HasSubstr;
using testing::meet;
using testing::passed;
using testing::soon;
using ::testing::ThrowsMessage;

template <class Body>
void run_groups(int size, const Body& body) {
  testing::run_groups(size, 256, body);
}

// One operation in which this rank gives given[r] elements to and takes expected[r] from rank r.
void all_to_all(Group& group, const std::vector<std::uint64_t>& given, const std::vector<std::uint64_t>& expected) {
  Operation operation{{CallKind::kAllToAll, DType::kInt8}};
  operation.has_counts = true;
  group.run(operation, soon(), [&] {
    group.set_counts(given, expected);
    group.announce();
    group.await_announcements(soon());
  });
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
      group.run(operation, soon(), [&] {
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

TEST(Groups, ShowWhatEveryRankGivesToAndExpectsFromEveryOther) {
  run_groups(3, [](Group& group) {
    const auto between = [](int from, int to) { return static_cast<std::uint64_t>(10 * from + to); };
    for (std::uint64_t round = 0; round < 5; ++round) {
      std::vector<std::uint64_t> given;
      std::vector<std::uint64_t> expected;
      for (int rank = 0; rank < 3; ++rank) {
        given.push_back(round + between(group.rank(), rank));
        expected.push_back(round + between(rank, group.rank()));
      }
      all_to_all(group, given, expected);
      for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
          EXPECT_EQ(group.given(from, to), round + between(from, to));
          EXPECT_EQ(group.expected(to, from), round + between(from, to));
        }
      }
      meet(group);
    }
  });
}

TEST(Groups, RaiseOnEveryRankWhenTwoOfThemDisagreeOnACountAndStayUsable) {
  run_groups(3, [](Group& group) {
    for (int round = 0; round < 3; ++round) {
      const std::uint64_t too_many = group.rank() == 1 ? 1 : 0;
      EXPECT_THROW(all_to_all(group, {1, 1, 1 + too_many}, {1, 1, 1}), MismatchedCollective) << "given by rank 1";
      EXPECT_THROW(all_to_all(group, {1, 1, 1}, {1, 1 + too_many, 1}), MismatchedCollective) << "expected by rank 1";
      EXPECT_NO_THROW(all_to_all(group, {1, 1, 1}, {1, 1, 1}));
    }
  });
}

TEST(Groups, RaiseAgainAndAgainWhileOperationsDifferAndStayUsable) {
  run_groups(3, [](Group& group) {
    meet(group);
    for (std::uint64_t round = 0; round < 10; ++round) {
      EXPECT_THROW(compare(group, group.rank() == 1 ? broadcast_of(round) : Operation{{CallKind::kBarrier}}),
                   MismatchedCollective);
      EXPECT_THROW(compare(group, broadcast_of(group.rank() == 2 ? 1 : 2)), MismatchedCollective);
      meet(group);
    }
    EXPECT_EQ(group.next_sequence(), 32u);
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

TEST(Groups, WaitForASegmentThatIsStillToBeMade) {
  std::atomic<bool> waited{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    std::atomic<bool> armed{false};
    Group group(store, rank, 2, 0, soon(), WaitHooks{[&] { waited = waited || armed; }});
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
      EXPECT_THAT([&] { group.peer_segment(1, 7, soon()); },
                  ThrowsMessage<PeerLost>(AllOf(HasSubstr("rank 1"), HasSubstr("has ended"))));
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
          group.run({{CallKind::kBarrier}}, soon(), [&] {
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
    auto group = std::make_unique<Group>(store, rank, 2, 0, soon(), WaitHooks());
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
    auto inherited = std::make_unique<Group>(store, rank, 3, 0, soon(), WaitHooks());
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

TEST(Groups, CountTheCoresThatAllRanksMayUseTogether) {
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(all), &all), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE && cores.size() < 2; ++core) {
    if (CPU_ISSET(core, &all)) {
      cores.push_back(core);
    }
  }
  if (cores.size() < 2 || (cpu_quota().cores > 0.0 && cpu_quota().cores < 2.0)) {
    GTEST_SKIP() << "two ranks are pinned apart where there are two cores";
  }
  for (const bool apart : {true, false}) {
    testing::run_threads(2, [&](Store& store, int rank) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cores[apart ? static_cast<std::size_t>(rank) : 0], &own);
      ASSERT_EQ(::sched_setaffinity(0, sizeof(own), &own), 0);  // of this thread
      Group group(store, rank, 2, 0, soon(), WaitHooks());
      EXPECT_EQ(group.cores(), apart ? 2.0 : 1.0);
      EXPECT_EQ(group.spin_limits().looks > 1, apart) << "those that share a core do not keep it to themselves";
      meet(group);
    });
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm
