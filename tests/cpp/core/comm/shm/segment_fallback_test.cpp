// Segments where memfd_create is refused: what takes its place, and what is said when nothing can.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/sandbox.h"
#include "core/comm/shm/segment.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kSharedMemory = "/dev/shm";

int refuse() {
  errno = EPERM;
  return -1;
}

int refuse_in(const char*) {
  errno = EOPNOTSUPP;
  return -1;
}

MemoryFiles without_memfd() {
  MemoryFiles files = MemoryFiles::of_system();
  files.anonymous = refuse;
  return files;
}

struct stat status_of(const Segment& segment) {
  struct stat status{};
  EXPECT_EQ(::fstat(segment.descriptor(), &status), 0);
  return status;
}

std::string refusal(const MemoryFiles& files, std::size_t size_bytes = 1) {
  return testing::message_of<SystemFailure>([&] { Segment::create(size_bytes, files); });
}

// Runs `check` in a child with mounts of its own.
template <class Check>
void expect_among_own_mounts(const Check& check) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  if (!testing::may_have_own_mounts()) {
    GTEST_SKIP() << "this user may not mount";
  }
  const std::filesystem::path folder = testing::make_temporary_folder();
  EXPECT_EQ(testing::wait_process(testing::start_process(folder, 0,
                                                         [&](Store&, int) {
                                                           ASSERT_TRUE(testing::enter_own_mounts());
                                                           check(folder.string());
                                                         })),
            0);
  std::filesystem::remove_all(folder);
}

class SegmentFallback : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access(kSharedMemory, W_OK) != 0) {
      GTEST_SKIP() << "this machine has no " << kSharedMemory;
    }
  }
};

TEST_F(SegmentFallback, IsANamelessFileOfItsOwnerInATmpfs) {
  const MemoryFiles files = without_memfd();
  const auto segment = Segment::create(5000, files);
  EXPECT_GE(segment->size_bytes(), 5000u);
  EXPECT_TRUE(
      std::all_of(segment->data(), segment->data() + 5000, [](std::byte byte) { return byte == std::byte{0}; }));
  std::memset(segment->data(), 1, segment->size_bytes());
  EXPECT_EQ(status_of(*segment).st_nlink, 0u);
  EXPECT_EQ(status_of(*segment).st_mode & 0777, 0600u);
  EXPECT_GT(testing::count_mappings(kSharedMemory), 0);
}

TEST_F(SegmentFallback, IsSharedThroughItsDescriptor) {
  const auto segment = Segment::create(1, without_memfd());
  EXPECT_EQ(Segment::map(::dup(segment->descriptor()))->data(), segment->data());
}

TEST_F(SegmentFallback, LosesItsNameAtOnceWhereFilesMustHaveOne) {
  MemoryFiles files = without_memfd();
  files.unnamed = refuse_in;
  const auto segment = Segment::create(100, files);
  EXPECT_EQ(status_of(*segment).st_nlink, 0u);
  EXPECT_EQ(status_of(*segment).st_mode & 0777, 0600u);
}

TEST_F(SegmentFallback, IsNotTriedWhenDescriptorsHaveRunOut) {
  MemoryFiles files = without_memfd();
  files.anonymous = [] {
    errno = EMFILE;
    return -1;
  };
  files.unnamed = files.unlinked = [](const char* folder) -> int {
    ADD_FAILURE() << folder << " was tried";
    return -1;
  };
  EXPECT_THAT(refusal(files),
              AllOf(HasSubstr("memfd_create"), HasSubstr("RLIMIT_NOFILE"), HasSubstr(std::strerror(EMFILE))));
}

TEST_F(SegmentFallback, SaysWhatItHasTriedWhenNothingIsLeft) {
  MemoryFiles files = without_memfd();
  files.unnamed = files.unlinked = refuse_in;
  files.folders = {"/proc", kSharedMemory, "/no/such/folder"};
  EXPECT_THAT(refusal(files), AllOf(HasSubstr("memfd_create is refused (" + std::string(std::strerror(EPERM))),
                                    HasSubstr("/proc is no tmpfs"),
                                    HasSubstr("/dev/shm takes no file (" + std::string(std::strerror(EOPNOTSUPP))),
                                    HasSubstr("/no/such/folder is no tmpfs"), HasSubstr("mount a writable tmpfs")));
}

TEST_F(SegmentFallback, SaysThatItsFolderIsFullAndHowToEnlargeIt) {
  MemoryFiles files = without_memfd();
  files.allocate = [](int, off_t, off_t) { return ENOSPC; };
  EXPECT_THAT(refusal(files), AllOf(HasSubstr("bytes of shared memory in /dev/shm"), HasSubstr("bytes left"),
                                    HasSubstr("docker run --shm-size"), HasSubstr(std::strerror(ENOSPC))));
  files.anonymous = MemoryFiles::of_system().anonymous;
  EXPECT_THAT(refusal(files), Not(HasSubstr("shm-size"))) << "which would not help an anonymous file";
}

TEST_F(SegmentFallback, InAFullTmpfsIsRefusedAndLeavesIt) {
  expect_among_own_mounts([](const std::string& folder) {
    testing::mount_tmpfs(folder, 1 << 20);
    MemoryFiles files = without_memfd();
    files.folders = {folder};
    const auto first = Segment::create(1 << 19, files);
    EXPECT_THAT(refusal(files, 1 << 20),
                AllOf(HasSubstr("allocating 1048576 bytes"), HasSubstr("which has 524288 bytes left")));
    std::memset(Segment::create(1 << 19, files)->data(), 1, 1 << 19);
  });
}

TEST_F(SegmentFallback, LooksForTheFirstFolderThatTakesFiles) {
  expect_among_own_mounts([](const std::string& folder) {
    testing::mount_tmpfs(folder, 1 << 20);
    MemoryFiles files = without_memfd();
    files.folders = {"/no/such/folder", folder, kSharedMemory};
    const auto segment = Segment::create(1, files);
    EXPECT_GT(testing::count_mappings(folder), 0);
  });
}

TEST_F(SegmentFallback, TellsFilesOfDifferentTmpfsApartThoughTheirInodesHaveOneNumber) {
  expect_among_own_mounts([](const std::string& folder) {
    MemoryFiles files = without_memfd();
    files.folders = {folder};
    testing::mount_tmpfs(folder, 1 << 20);
    const auto one = Segment::create(1, files);
    testing::mount_tmpfs(folder, 1 << 20);
    const auto other = Segment::create(1, files);
    ASSERT_EQ(status_of(*one).st_ino, status_of(*other).st_ino);
    EXPECT_NE(one->data(), other->data());
  });
}

TEST(SegmentAllocation, GoesOnWhereASignalHasEndedIt) {
  static int calls = 0;
  static off_t allocated = 0;
  calls = 0;
  allocated = 0;
  MemoryFiles files = MemoryFiles::of_system();
  files.allocate = [](int descriptor, off_t offset, off_t size_bytes) {
    EXPECT_EQ(offset, allocated);
    if (++calls % 2 == 1) {
      return EINTR;
    }
    allocated += size_bytes;
    return ::posix_fallocate(descriptor, offset, size_bytes);
  };
  const std::size_t size_bytes = 20 << 20;
  const auto segment = Segment::create(size_bytes, files);
  EXPECT_EQ(segment->size_bytes(), size_bytes);
  EXPECT_EQ(status_of(*segment).st_blocks * 512, static_cast<blkcnt_t>(size_bytes)) << "all of it is there";
  EXPECT_GT(calls, 2) << "a signal costs a part of what is allocated, not all of it";
}

}  // namespace
}  // namespace accelerate_cpp::comm
