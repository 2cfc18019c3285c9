#include "core/comm/shm/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/operands.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/sandbox.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {
namespace {

using testing::message_of;
using testing::run_processes;
using testing::run_threads;
using testing::soon;

constexpr std::size_t kBytes = 3 * 4096 + 5;

std::byte* bytes_of(const std::shared_ptr<Buffer>& buffer) {
  return static_cast<std::byte*>(buffer->data());
}

TEST(Windows, ShowEveryRankWhatTheOthersWrite) {
  run_processes(3, [](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 3, soon(), {});
    const std::shared_ptr<Buffer> window = communicator->window(kBytes, soon());
    for (std::size_t i = 0; i < kBytes; ++i) {
      ASSERT_EQ(bytes_of(window)[i], std::byte{0});
    }
    communicator->barrier(soon());
    bytes_of(window)[static_cast<std::size_t>(rank) * 4096] = static_cast<std::byte>(rank + 1);
    communicator->barrier(soon());
    for (std::size_t peer = 0; peer < 3; ++peer) {
      EXPECT_EQ(bytes_of(window)[peer * 4096], static_cast<std::byte>(peer + 1));
    }
    communicator->barrier(soon());
  });
}

TEST(Windows, OutliveTheGroupAndTheRankThatAllocatedThem) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const auto body = [](Store& store, int rank) {
    auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    const std::shared_ptr<Buffer> window = communicator->window(kBytes, soon());
    if (rank == 0) {
      std::memset(window->data(), 7, kBytes);
    }
    communicator->barrier(soon());
    communicator.reset();
    if (rank == 0) {
      ::raise(SIGKILL);
    }
    store.get("rank 0 is gone", soon());
    EXPECT_EQ(bytes_of(window)[kBytes - 1], std::byte{7});
  };
  const pid_t first = testing::start_process(folder, 0, body);
  const pid_t second = testing::start_process(folder, 1, body);
  EXPECT_EQ(testing::wait_process(first), -SIGKILL);
  testing::FolderStore(folder).set("rank 0 is gone", "");
  EXPECT_EQ(testing::wait_process(second), 0);
  std::filesystem::remove_all(folder);
}

TEST(Windows, KeepTheirMemoryWhileOneRankUsesIt) {
  run_processes(2, [](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    std::shared_ptr<Buffer> window = communicator->window(kBytes, soon());
    bytes_of(window)[0] = std::byte{9};
    communicator->barrier(soon());
    if (rank == 0) {
      window.reset();
    }
    for (int round = 0; round < 3; ++round) {  // in which arenas give back what nobody uses
      communicator->group()->arena()->poll();
      communicator->barrier(soon());
    }
    if (rank == 1) {
      EXPECT_EQ(bytes_of(window)[0], std::byte{9});
    }
  });
}

TEST(Windows, KeepTheirMemoryForARankThatHasLeftTheGroup) {
  run_processes(2, [](Store& store, int rank) {
    auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    std::shared_ptr<Buffer> window = communicator->window(kBytes, soon());
    bytes_of(window)[0] = std::byte{9};
    communicator->barrier(soon());
    if (rank == 1) {
      communicator.reset();
      store.set("left", "");
      store.get("given up", soon());
      EXPECT_EQ(bytes_of(window)[0], std::byte{9});
      return;
    }
    store.get("left", soon());
    window.reset();
    for (int round = 0; round < 3; ++round) {  // in which an arena gives back what nobody uses
      communicator->group()->arena()->poll();
    }
    store.set("given up", "");
  });
}

TEST(Windows, LeaveNeitherNamesNorDescriptors) {
  run_processes(2, [](Store& store, int rank) {
    const auto count = [](const char* folder) {
      const auto entries = std::filesystem::directory_iterator(folder);
      return std::distance(begin(entries), end(entries));
    };
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    std::vector<std::shared_ptr<Buffer>> windows = {communicator->window(kBytes, soon())};
    communicator->group()->arena()->poll();
    communicator->barrier(soon());
    const auto descriptors = count("/proc/self/fd");
    for (int i = 0; i < 20; ++i) {
      windows.push_back(communicator->window(kBytes, soon()));
    }
    communicator->group()->arena()->poll();
    EXPECT_EQ(count("/proc/self/fd"), descriptors);
    communicator->barrier(soon());
  });
}

TEST(Windows, OfDifferentSizesAreRefusedOnAllRanks) {
  run_threads(2, [](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    const std::string message =
        message_of<MismatchedCollective>([&] { communicator->window(rank == 0 ? kBytes : kBytes + 1, soon()); });
    EXPECT_THAT(message, ::testing::HasSubstr("window of " + std::to_string(kBytes + 1) + " bytes"));
    EXPECT_NE(communicator->window(kBytes, soon()), nullptr);
  });
}

TEST(Windows, ForWhichThereIsNoMemoryFailOnAllRanksAndLeaveTheGroupUsable) {
  run_processes(2, [](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    const std::string message = message_of<SystemFailure>([&] { communicator->window(std::size_t{1} << 50, soon()); });
    EXPECT_THAT(message, ::testing::HasSubstr(std::to_string(std::size_t{1} << 50)));
    EXPECT_NE(communicator->window(kBytes, soon()), nullptr);
  });
}

TEST(Windows, WorkWithoutMemfd) {
  run_processes(2, [](Store& store, int rank) {
    testing::refuse_memfd_and_pidfd(EPERM);
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    const std::shared_ptr<Buffer> window = communicator->window(kBytes, soon());
    bytes_of(window)[static_cast<std::size_t>(rank)] = std::byte{1};
    communicator->barrier(soon());
    EXPECT_EQ(bytes_of(window)[1 - static_cast<std::size_t>(rank)], std::byte{1});
    communicator->barrier(soon());
  });
}

TEST(Windows, OfOneRankAreItsOwn) {
  SoloCommunicator communicator;
  const std::shared_ptr<Buffer> window = communicator.window(kBytes, soon());
  EXPECT_EQ(bytes_of(window)[kBytes - 1], std::byte{0});
}

}  // namespace
}  // namespace accelerate_cpp::comm
