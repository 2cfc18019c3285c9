#include "core/comm/shm/shm_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>

#include "core/comm/communicator_conformance.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::Operand;
using testing::soon;

std::shared_ptr<ShmCommunicator> connect(Store& store, int rank, int size, InterruptProbe probe = [] {}) {
  return ShmCommunicator::connect(store, rank, size, soon(), WaitHooks{std::move(probe)});
}

Deadline in(int milliseconds) {
  return Deadline::after(std::chrono::milliseconds(milliseconds));
}

class ShmOfSize : public ::testing::TestWithParam<int> {};

TEST_P(ShmOfSize, ConformsToCommunicatorWithThreadsAsRanks) {
  testing::run_threads(GetParam(), [](Store& store, int rank) {
    const auto communicator = connect(store, rank, GetParam());
    testing::check_all(*communicator);
  });
}

TEST_P(ShmOfSize, ConformsToCommunicatorWithProcessesAsRanks) {
  testing::run_processes(GetParam(), [](Store& store, int rank) {
    const auto communicator = connect(store, rank, GetParam());
    testing::check_all(*communicator);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmOfSize, ::testing::Values(1, 2, 3, 5));

TEST(Shm, GivesTheSameBitsOnEveryRankAndFromRunToRun) {
  std::vector<std::vector<std::byte>> results(4);
  const auto run = [&](std::size_t first) {
    testing::run_threads(2, [&](Store& store, int rank) {
      const auto communicator = connect(store, rank, 2);
      std::vector<float> data(300001);
      for (std::size_t i = 0; i < data.size(); ++i) {
        data[i] = 1.0f / static_cast<float>(i + 1 + 17 * static_cast<std::size_t>(rank));
      }
      communicator->all_reduce({data.data(), data.size(), DType::kFloat32}, ReduceOp::kAvg, soon());
      const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
      results[first + static_cast<std::size_t>(rank)].assign(bytes, bytes + data.size() * sizeof(float));
    });
  };
  run(0);
  run(2);
  EXPECT_TRUE(results[0] == results[1]);
  EXPECT_TRUE(results[0] == results[2]);
  EXPECT_TRUE(results[0] == results[3]);
}

TEST(Shm, NamesEveryRankWhenCollectivesDifferAndStaysUsable) {
  testing::run_threads(3, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 3);
    Operand data(rank == 1 ? 3 : 2, DType::kFloat32);
    const std::string message = message_of<MismatchedCollective>(
        [&] { communicator->all_reduce(data.fill(rank).view(), ReduceOp::kSum, soon()); });
    EXPECT_THAT(message, HasSubstr("rank 0: all_reduce(sum) of 2 float32"));
    EXPECT_THAT(message, HasSubstr("rank 1: all_reduce(sum) of 3 float32"));
    const std::string order = message_of<MismatchedCollective>(
        [&] { rank == 0 ? communicator->barrier(soon()) : communicator->broadcast(data.view(), 0, soon()); });
    EXPECT_THAT(order, HasSubstr("rank 0: barrier"));
    testing::check_all_reduce(*communicator, 100, DType::kFloat32, ReduceOp::kSum, false);
  });
}

TEST(Shm, RefusesTensorsThatOnlyTheRootMayPassBeforeAnythingHappens) {
  testing::run_threads(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    const Operand data(4, DType::kFloat32);
    const MemoryView view = data.view();
    if (rank == 1) {
      EXPECT_THROW(communicator->gather(view, {view, view, view}, 0, soon()), InvalidArgument);
      EXPECT_THROW(communicator->scatter({view}, view, 0, soon()), InvalidArgument);
    }
    testing::check_all_reduce(*communicator, 100, DType::kFloat32, ReduceOp::kSum, false);
  });
}

TEST(Shm, SaysThatARankLeftEarly) {
  testing::run_threads(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    communicator->barrier(soon());
    if (rank == 0) {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("rank 1 has left"));
      EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("the group has failed"));
    }
  });
}

TEST(Shm, RaisesOnEveryRankWhenOneAborts) {
  testing::run_threads(3, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 3);
    if (rank == 2) {
      communicator->abort("out of memory in backward");
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("out of memory in backward"));
  });
}

TEST(Shm, TimesOutWithTheRankItWaitedFor) {
  std::atomic<bool> done{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    if (rank == 0) {
      EXPECT_THAT(message_of<Timeout>([&] { communicator->barrier(in(200)); }), HasSubstr("waited for rank 1"));
      done = true;
    }
    while (!done) {
      std::this_thread::yield();
    }
    if (rank == 1) {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("rank 0 failed"));
    }
  });
}

TEST(Shm, StopsWaitingWhenTheProbeThrows) {
  struct Interrupted {};
  std::atomic<bool> done{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    std::atomic<int> armed{0};
    const auto communicator = connect(store, rank, 2, [&armed] {
      if (armed != 0) {
        throw Interrupted();
      }
    });
    if (rank == 0) {
      armed = 1;
      EXPECT_THROW(communicator->barrier(soon()), Interrupted);
      done = true;
    }
    while (!done) {
      std::this_thread::yield();
    }
  });
}

TEST(Shm, NamesTheRankThatWasKilled) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const pid_t victim = testing::start_process(folder, 1, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    communicator->barrier(soon());
    ::raise(SIGKILL);
  });
  const pid_t survivor = testing::start_process(folder, 0, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    communicator->barrier(soon());
    EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("rank 1"));
  });
  EXPECT_EQ(testing::wait_process(victim), -SIGKILL);
  EXPECT_EQ(testing::wait_process(survivor), 0);
  std::filesystem::remove_all(folder);
}

TEST(Shm, NamesTheKilledRankAlsoWhileAChildOfItLivesOn) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  int release[2];
  ASSERT_EQ(::pipe(release), 0);
  const pid_t victim = testing::start_process(folder, 1, [&](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    communicator->barrier(soon());
    if (::fork() == 0) {
      char byte = 0;
      ::close(release[1]);
      ::_exit(static_cast<int>(::read(release[0], &byte, 1)));
    }
    ::raise(SIGKILL);
  });
  const pid_t survivor = testing::start_process(folder, 0, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    communicator->barrier(soon());
    EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("has ended"));
  });
  EXPECT_EQ(testing::wait_process(victim), -SIGKILL);
  EXPECT_EQ(testing::wait_process(survivor), 0);
  ::close(release[0]);
  ::close(release[1]);
  std::filesystem::remove_all(folder);
}

TEST(Shm, RefusesToRunInAForkedChild) {
  testing::run_processes(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string message = message_of<InvalidArgument>([&] { communicator->barrier(in(1000)); });
      ::_exit(message.find("forked") == std::string::npos ? 1 : 0);
    }
    EXPECT_EQ(testing::wait_process(child), 0);
    communicator->barrier(soon());
  });
}

TEST(Shm, TimesOutWhenARankNeverComes) {
  MemoryStore store;
  EXPECT_THAT(message_of<Timeout>([&] { ShmCommunicator::connect(store, 0, 2, in(100), {}); }),
              HasSubstr("for rank 1 in vain"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
