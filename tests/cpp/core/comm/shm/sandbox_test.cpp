// Communicators of real processes where the system refuses something: memfd_create, pidfd_open, memory.
#include "core/comm/shm/sandbox.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/comm/communicator_conformance.h"
#include "core/comm/shm/liveness.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::soon;

std::shared_ptr<ShmCommunicator> connect(Store& store, int rank, int size) {
  return ShmCommunicator::connect(store, rank, size, soon(), WaitHooks{});
}

class Sandbox : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kThreadSanitizer) {
      GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
    }
  }
};

class SandboxWithout : public Sandbox, public ::testing::WithParamInterface<int> {};

TEST_P(SandboxWithout, MemfdAndPidfdHasConformingCommunicators) {
  testing::run_processes(2, [](Store& store, int rank) {
    testing::refuse_memfd_and_pidfd(GetParam());
    ASSERT_LT(ProcessWatch::open_pidfd(::getppid()), 0);
    const auto inherited = testing::count_mappings("memfd:");
    const auto communicator = connect(store, rank, 2);
    ASSERT_EQ(testing::count_mappings("memfd:"), inherited);
    ASSERT_GT(testing::count_mappings("/dev/shm/"), 0);
    testing::check_all(*communicator);
  });
}

INSTANTIATE_TEST_SUITE_P(Refusals, SandboxWithout, ::testing::Values(ENOSYS, EPERM));

TEST_F(Sandbox, OfOneRankDoesNotMatterToTheOthers) {
  testing::run_processes(2, [](Store& store, int rank) {
    if (rank == 1) {
      testing::refuse_memfd_and_pidfd(ENOSYS);
    }
    testing::check_all(*connect(store, rank, 2));
  });
}

TEST_F(Sandbox, WithoutPidfdNoticesThatARankWasKilled) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const auto body = [](Store& store, int rank) {
    testing::refuse_memfd_and_pidfd(EPERM);
    const auto communicator = connect(store, rank, 3);
    communicator->barrier(soon());
    if (rank == 1) {
      ::kill(::getpid(), SIGKILL);
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("rank 1 has ended"));
  };
  const pid_t zero = testing::start_process(folder, 0, body);
  const pid_t one = testing::start_process(folder, 1, body);
  const pid_t two = testing::start_process(folder, 2, body);
  EXPECT_EQ(testing::wait_process(one), -SIGKILL);
  EXPECT_EQ(testing::wait_process(zero), 0);
  EXPECT_EQ(testing::wait_process(two), 0);
  std::filesystem::remove_all(folder);
}

TEST_F(Sandbox, InWhichAnotherProcessTakesTheIdOfARankMissesThatRankAllTheSame) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const auto body = [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    if (rank == 1) {
      ::kill(::getpid(), SIGKILL);
    }
    store.get("impostor", soon());
    EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }), HasSubstr("rank 1 has ended"));
  };
  const pid_t zero = testing::start_process(folder, 0, body);
  const pid_t one = testing::start_process(folder, 1, body);
  EXPECT_EQ(testing::wait_process(one), -SIGKILL);
  const pid_t impostor = testing::start_impostor(one);
  testing::FolderStore(folder).set("impostor", "");
  EXPECT_EQ(testing::wait_process(zero), 0);
  if (impostor > 0) {
    EXPECT_EQ(impostor, one);
    ::kill(impostor, SIGKILL);
    testing::wait_process(impostor);
  }
  std::filesystem::remove_all(folder);
  if (impostor < 0) {
    GTEST_SKIP() << "this user may not choose process ids";
  }
}

// Rank 1 alone is short of memory, by `shorten`: it says so, and the other rank says that it is gone.
template <class Shorten>
void expect_told_about_memory(const Shorten& shorten, const std::string& reason) {
  if (!testing::may_have_own_mounts()) {
    GTEST_SKIP() << "this user may not mount";
  }
  testing::run_processes(2, [&](Store& store, int rank) {
    if (rank == 0) {
      EXPECT_THAT(message_of<PeerLost>([&] { connect(store, rank, 2); }), HasSubstr("rank 1"));
      return;
    }
    ASSERT_TRUE(testing::enter_own_mounts());
    shorten();
    EXPECT_THAT(message_of<SystemFailure>([&] { connect(store, rank, 2); }),
                AllOf(HasSubstr("bytes of shared memory"), HasSubstr("bytes left"), HasSubstr(reason)));
  });
}

TEST_F(Sandbox, WithAFullTmpfsIsToldHowToEnlargeIt) {
  expect_told_about_memory(
      [] {
        testing::mount_tmpfs("/dev/shm", 1 << 16);
        testing::refuse_memfd_and_pidfd(ENOSYS);
      },
      "in /dev/shm (memfd_create is refused), which has 65536 bytes left; enlarge it");
}

// In place of the control groups of this machine: roots that allow little, of whichever version this machine has.
void limit_control_groups() {
  testing::mount_tmpfs("/sys/fs/cgroup", 1 << 20);
  std::filesystem::create_directory("/sys/fs/cgroup/memory");
  for (const char* const limit : {"memory.max", "memory/memory.limit_in_bytes"}) {
    std::ofstream(std::string("/sys/fs/cgroup/") + limit) << "1000000\n";
  }
  for (const char* const usage : {"memory.current", "memory/memory.usage_in_bytes"}) {
    std::ofstream(std::string("/sys/fs/cgroup/") + usage) << "900000\n";
  }
}

TEST_F(Sandbox, AtTheLimitOfItsControlGroupIsToldSo) {
  expect_told_about_memory(limit_control_groups, "has 100000 bytes left; free some, raise the limit");
}

}  // namespace
}  // namespace accelerate_cpp::comm
