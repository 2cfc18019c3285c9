// Point-to-point messages that do not fit, do not come, or whose other end is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/shm/engines.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::await;
using testing::Engine;
using testing::expect_message;
using ::testing::HasSubstr;
using testing::Integers;
using testing::meet;
using testing::passed;
using testing::run_engines;
using testing::send;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr int kAny = Communicator::kAnySource;

// Makes progress until the transfer has ended.
void poll_until_ended(Transfer& transfer) {
  const Deadline deadline = soon();
  while (!transfer.poll() && !deadline.expired()) {
    std::this_thread::yield();
  }
}

TEST(LostPeers, HaveSentWhatTheyHadSentBeforeTheyLeft) {
  std::atomic<bool> left{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    auto group = std::make_shared<Group>(store, rank, 2, 0, soon(), WaitHooks());
    Engine engine{group, std::make_shared<PointToPoint>(group)};
    if (rank == 0) {
      send(engine, 1, 1, Integers(100000, 6));
      send(engine, 1, 2, Integers(3, 7));
      engine = {};
      group.reset();
      left = true;
      return;
    }
    await(left);
    expect_message(engine, 0, 2, 3, 7);
    expect_message(engine, kAny, 1, 100000, 6);
    Integers data(1);
    EXPECT_THAT([&] { expect_message(engine, 0, 3, 1, 0); },
                ThrowsMessage<PeerLost>(AllOf(HasSubstr("receive of 1 int32 from rank 0 with tag 3 on rank 1"),
                                              HasSubstr("rank 0 has left"))));
    EXPECT_THAT([&] { engine.messages->send(data.view(), 0, 0, soon()); },
                ThrowsMessage<PeerLost>(AllOf(HasSubstr("send of 1 int32 to rank 0"), HasSubstr("rank 0 has left"))));
  });
}

TEST(LostPeers, EndTransfersThatAreOnlyPolled) {
  run_engines(2, [](Engine& engine) {
    meet(*engine.group);
    if (engine.rank() == 0) {
      Integers data(1);
      const auto transfer = engine.messages->receive(data.view(), 1, 0, soon());
      poll_until_ended(*transfer);
      EXPECT_THAT([&] { transfer->wait(passed()); }, ThrowsMessage<PeerLost>(HasSubstr("rank 1 has left")));
    }
  });
}

TEST(LostPeers, DoNotKeepAReceiveFromAnyRankFromGettingTheMessageOfAnother) {
  std::atomic<bool> armed{false};
  std::atomic<int> looks{0};
  const auto hooks = [&](int rank) {
    return WaitHooks{[&armed, &looks, rank] { looks += armed && rank == 0 ? 1 : 0; }};
  };
  testing::run_engines_with(hooks, 3, PointToPoint::kPoolBytes, [&](Engine& engine) {
    meet(*engine.group);
    if (engine.rank() == 0) {
      while (!engine.group->loss_of(2, false)) {
        std::this_thread::yield();
      }
      Integers data(1);
      const auto transfer = engine.messages->receive(data.view(), kAny, 0, soon());
      armed = true;
      transfer->wait(soon());
      data.expect(4);
      EXPECT_EQ(transfer->source(), 1);
      EXPECT_THAT([&] { expect_message(engine, kAny, 0, 1, 4); }, ThrowsMessage<PeerLost>(HasSubstr("has left")))
          << "all have left now";
    } else if (engine.rank() == 1) {
      while (looks < 3) {
        std::this_thread::yield();
      }
      send(engine, 0, 0, Integers(1, 4));
    }
  });
}

TEST(LostPeers, AreNamedAlsoWhenTheyAreKilled) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  const auto connect = [](Store& store, int rank) {
    const auto group = std::make_shared<Group>(store, rank, 2, 0, soon(), WaitHooks());
    return Engine{group, std::make_shared<PointToPoint>(group)};
  };
  const pid_t victim = testing::start_process(folder, 1, [&](Store& store, int rank) {
    Engine engine = connect(store, rank);
    send(engine, 0, 0, Integers(50000, 3));
    ::raise(SIGKILL);
  });
  const pid_t survivor = testing::start_process(folder, 0, [&](Store& store, int rank) {
    Engine engine = connect(store, rank);
    for (const int source : {1, kAny}) {
      EXPECT_THAT([&] { expect_message(engine, source, 1, 2, 0); },
                  ThrowsMessage<PeerLost>(HasSubstr("rank 1 has ended")));
    }
    expect_message(engine, 1, 0, 50000, 3);
  });
  EXPECT_EQ(testing::wait_process(victim), -SIGKILL);
  EXPECT_EQ(testing::wait_process(survivor), 0);
  std::filesystem::remove_all(folder);
}

// Sends a message the second half of which cannot be read, so that the process ends on the way.
void die_while_sending(Engine& engine) {
  constexpr std::size_t kBytes = std::size_t{2} << 20;
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(::mprotect(static_cast<std::byte*>(memory) + kBytes / 2, kBytes / 2, PROT_NONE), 0);
  ::signal(SIGSEGV, SIG_DFL);
  engine.messages->send({memory, kBytes, DType::kUInt8}, 0, 0, soon());
}

TEST(LostPeers, AreNamedAlsoWhenTheyEndInTheMiddleOfAMessage) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  const auto connect = [](Store& store, int rank) {
    const auto group = std::make_shared<Group>(store, rank, 2, 0, soon(), WaitHooks());
    return Engine{group, std::make_shared<PointToPoint>(group)};
  };
  const pid_t victim = testing::start_process(folder, 1, [&](Store& store, int rank) {
    Engine engine = connect(store, rank);
    die_while_sending(engine);
  });
  const pid_t survivor = testing::start_process(folder, 0, [&](Store& store, int rank) {
    Engine engine = connect(store, rank);
    std::vector<std::uint8_t> data(std::size_t{2} << 20);
    const auto transfer = engine.messages->receive({data.data(), data.size(), DType::kUInt8}, 1, 0, soon());
    EXPECT_THAT([&] { transfer->wait(soon()); }, ThrowsMessage<PeerLost>(HasSubstr("rank 1 has ended")));
  });
  EXPECT_EQ(testing::wait_process(victim), -SIGSEGV);
  EXPECT_EQ(testing::wait_process(survivor), 0);
  std::filesystem::remove_all(folder);
}

TEST(TransferDeadlines, OfTheCallEndTheTransfer) {
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      Integers too_late(2, -1);
      const auto transfer = engine.messages->receive(too_late.view(), 1, 0, passed());
      EXPECT_THAT([&] { transfer->wait(soon()); },
                  ThrowsMessage<Timeout>(AllOf(HasSubstr("receive of 2 int32 from rank 1 with tag 0 on rank 0"),
                                               HasSubstr("\n  rank 1 "))));
      EXPECT_TRUE(transfer->poll());
      meet(*engine.group);
      expect_message(engine, 1, 0, 2, 5);
      too_late.expect(-1);
    } else {
      meet(*engine.group);
      send(engine, 0, 0, Integers(2, 5));
    }
  });
}

TEST(TransferDeadlines, OfTheCallEndATransferThatIsOnlyPolled) {
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      Integers data(2, -1);
      const auto transfer = engine.messages->receive(data.view(), 1, 0, passed());
      poll_until_ended(*transfer);
      EXPECT_THROW(transfer->wait(soon()), Timeout);
    }
    meet(*engine.group);
  });
}

TEST(TransferDeadlines, OfWaitingLeaveTheTransferPosted) {
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      Integers data(2, -1);
      const auto transfer = engine.messages->receive(data.view(), 1, 0, soon());
      EXPECT_THAT([&] { transfer->wait(passed()); },
                  ThrowsMessage<Timeout>(HasSubstr("receive of 2 int32 from rank 1 with tag 0 on rank 0")));
      EXPECT_FALSE(transfer->poll());
      meet(*engine.group);
      transfer->wait(soon());
      data.expect(5);
    } else {
      meet(*engine.group);
      send(engine, 0, 0, Integers(2, 5));
    }
  });
}

TEST(TransferDeadlines, EndASendForWhichThereIsNoRoom) {
  constexpr std::size_t kPoolBytes = 64 * 1024;
  run_engines(
      2,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          send(engine, 1, 0, Integers(kPoolBytes / 4, 1));
          Integers more(kPoolBytes / 4, 2);
          const auto held_back = engine.messages->send(more.view(), 1, 0, passed());
          EXPECT_THAT([&] { held_back->wait(soon()); },
                      ThrowsMessage<Timeout>(HasSubstr("send of 16384 int32 to rank 1")));
          meet(*engine.group);
          send(engine, 1, 0, Integers(kPoolBytes / 4, 3));
        } else {
          meet(*engine.group);
          expect_message(engine, 0, 0, kPoolBytes / 4, 1);
          expect_message(engine, 0, 0, kPoolBytes / 4, 3);
        }
      },
      kPoolBytes);
}

TEST(LongWaitsForMessages, AreReportedOnce) {
  std::vector<std::string> warnings;
  std::atomic<bool> armed{false};
  std::atomic<int> looks{0};
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
    result.warn_after = std::chrono::milliseconds(0);
    return result;
  };
  testing::run_engines_with(hooks, 2, PointToPoint::kPoolBytes, [&](Engine& engine) {
    if (engine.rank() == 0) {
      armed = true;  // what was done to form the group does not count
      Integers data(2, -1);
      engine.messages->receive(data.view(), 1, 9, Call(soon(), {}, "pipeline.py:12"))->wait(soon());
      data.expect(5);
    } else {
      while (looks < 5) {
        std::this_thread::yield();
      }
      send(engine, 0, 9, Integers(2, 5));
    }
  });
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], AllOf(HasSubstr("receive of 2 int32 from rank 1 with tag 9 on rank 0 at pipeline.py:12"),
                                 HasSubstr("\n  rank 1 has not called a collective of this group")));
}

TEST(LongWaitsForMessages, EndWhenTheProbeThrowsAndLeaveTheTransferPosted) {
  struct Interrupted {};
  std::atomic<bool> armed{false};
  const auto hooks = [&](int rank) {
    return WaitHooks{[&armed, rank] {
      if (armed && rank == 0) {
        throw Interrupted();
      }
    }};
  };
  testing::run_engines_with(hooks, 2, PointToPoint::kPoolBytes, [&](Engine& engine) {
    meet(*engine.group);
    if (engine.rank() == 0) {
      Integers data(2, -1);
      const auto transfer = engine.messages->receive(data.view(), 1, 0, soon());
      armed = true;
      EXPECT_THROW(transfer->wait(soon()), Interrupted);
      armed = false;
      meet(*engine.group);
      transfer->wait(soon());
      data.expect(5);
    } else {
      meet(*engine.group);
      send(engine, 0, 0, Integers(2, 5));
    }
  });
}

TEST(LongWaitsForMessages, EndWhenTheGroupIsAbortedOnEitherSide) {
  for (const int aborting : {0, 1}) {
    std::atomic<bool> waits{false};
    std::atomic<bool> done{false};
    const auto hooks = [&](int rank) { return WaitHooks{[&waits, rank] { waits = waits || rank == 0; }}; };
    testing::run_engines_with(hooks, 2, PointToPoint::kPoolBytes, [&](Engine& engine) {
      std::thread watchdog([&] {
        if (engine.rank() == aborting) {
          await(waits);
          engine.group->abort("the disk is full");
        }
      });
      if (engine.rank() == 0) {
        EXPECT_THAT([&] { expect_message(engine, 1, 0, 1, 0); },
                    ThrowsMessage<PeerLost>(HasSubstr("the disk is full")));
        done = true;
      }
      await(done);
      watchdog.join();
    });
  }
}

TEST(TransfersInAForkedChild, AreRefusedAndLeaveThoseOfTheParentAlone) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  testing::run_processes(2, [](Store& store, int rank) {
    const auto group = std::make_shared<Group>(store, rank, 2, 0, soon(), WaitHooks());
    Engine engine{group, std::make_shared<PointToPoint>(group)};
    if (rank == 1) {
      send(engine, 0, 1, Integers(1, 1));
      meet(*group);
      send(engine, 0, 0, Integers(2, 5));
      meet(*group);
      meet(*group);
      return;
    }
    expect_message(engine, 1, 1, 1, 1);  // so that the child knows where the messages of rank 1 lie
    Integers data(2, -1);
    const auto transfer = engine.messages->receive(data.view(), 1, 0, soon());
    meet(*group);
    meet(*group);
    const pid_t child = ::fork();
    if (child == 0) {
      Integers other(2);
      const auto refused = ThrowsMessage<InvalidArgument>(HasSubstr("forked from rank 0"));
      EXPECT_THAT([&] { engine.messages->send(other.view(), 1, 0, soon()); }, refused);
      EXPECT_THAT([&] { engine.messages->receive(other.view(), 1, 0, soon()); }, refused);
      transfer->poll();
      EXPECT_THAT([&] { transfer->wait(soon()); }, refused);
      ::_exit(::testing::Test::HasFailure() ? 3 : 0);
    }
    EXPECT_EQ(testing::wait_process(child), 0);
    transfer->wait(soon());
    data.expect(5);
    meet(*group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
