#include "core/comm/shm/memory_limit.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

// A tree of control groups in a temporary folder.
class MemoryLimit : public ::testing::Test {
 protected:
  MemoryLimit() : root_(testing::make_temporary_folder()) {}
  ~MemoryLimit() override { std::filesystem::remove_all(root_); }

  // The path of `group` ("" for the root), with the given files.
  std::string group(const std::string& group, const std::string& limit, const std::string& current,
                    const std::string& stat = "") {
    const std::filesystem::path folder = group.empty() ? root_ : root_ / group;
    std::filesystem::create_directories(folder);
    write(folder / "memory.max", limit);
    write(folder / "memory.current", current);
    write(folder / "memory.stat", stat);
    return folder.string();
  }

  const std::filesystem::path& root() const { return root_; }

  // The same for version 1 of control groups.
  std::string old_group(const std::string& group, const std::string& limit, const std::string& usage,
                        const std::string& stat = "") {
    const std::filesystem::path folder = root_ / group;
    std::filesystem::create_directories(folder);
    write(folder / "memory.limit_in_bytes", limit);
    write(folder / "memory.usage_in_bytes", usage);
    write(folder / "memory.stat", stat);
    return folder.string();
  }

  std::optional<std::size_t> left(const std::string& folder) const { return memory_left_in({folder, root_.string()}); }

 private:
  static void write(const std::filesystem::path& path, const std::string& text) {
    if (!text.empty()) {
      std::ofstream(path) << text << "\n";
    }
  }

  const std::filesystem::path root_;
};

TEST_F(MemoryLimit, IsWhatTheLimitLeavesBesideWhatIsInUse) {
  EXPECT_EQ(left(group("job", "1000", "300")), 700u);
}

TEST_F(MemoryLimit, DoesNotCountPagesThatTheKernelGivesBack) {
  EXPECT_EQ(left(group("job", "1000", "300", "anon 150\nfile 150\nactive_file 50\ninactive_file 100\nshmem 7")), 800u);
}

TEST_F(MemoryLimit, CountsNoMoreGivenBackThanIsInUse) {
  EXPECT_EQ(left(group("job", "1000", "300", "inactive_file 5000")), 1000u);
}

TEST_F(MemoryLimit, IsNothingLeftWhenMoreIsInUseThanAllowed) {
  EXPECT_EQ(left(group("job", "1000", "1500")), 0u);
}

TEST_F(MemoryLimit, IsTheTightestOfTheNestedGroups) {
  group("outer", "5000", "4900");
  group("outer/middle", "10000", "100");
  EXPECT_EQ(left(group("outer/middle/inner", "2000", "50")), 100u);
  group("outer", "5000", "100");
  EXPECT_EQ(left(group("outer/middle/inner", "2000", "50")), 1950u);
}

TEST_F(MemoryLimit, OfTheRootCounts) {
  group("", "400", "100");
  EXPECT_EQ(left(group("job", "1000", "100")), 300u);
}

TEST_F(MemoryLimit, OfGroupsBesideTheOwnDoesNotCount) {
  group("neighbour", "10", "10");
  EXPECT_EQ(left(group("job", "1000", "100")), 900u);
}

TEST_F(MemoryLimit, OfMaxIsNone) {
  EXPECT_EQ(left(group("job", "max", "300")), std::nullopt);
  EXPECT_EQ(left(group("job/inner", "1000", "300")), 700u) << "an unlimited parent does not lift a child's limit";
  group("limited", "1000", "300");
  EXPECT_EQ(left(group("limited/inner", "max", "300")), 700u) << "and an unlimited child has its parent's";
}

TEST_F(MemoryLimit, IsNoneWithoutTheFiles) {
  EXPECT_EQ(left(group("job", "", "")), std::nullopt);
  EXPECT_EQ(left(group("job", "1000", "")), std::nullopt);
  EXPECT_EQ(left(group("other", "", "10")), std::nullopt);
  EXPECT_EQ(memory_left_in({"/no/such/group", "/no"}), std::nullopt);
}

TEST_F(MemoryLimit, AllowsSizesBeyondFourGigabytes) {
  EXPECT_EQ(left(group("job", "1099511627776", "1073741824")), 1098437885952u);
}

TEST_F(MemoryLimit, OfVersion1IsReadToo) {
  EXPECT_EQ(left(old_group("job", "1000", "300")), 700u);
  EXPECT_EQ(left(old_group("job", "1000", "300", "inactive_file 5\ntotal_rss 1\ntotal_inactive_file 100")), 800u);
  EXPECT_EQ(left(old_group("job/inner", "5000", "100")), 800u);
}

TEST_F(MemoryLimit, OfVersion1ThatIsNoneAllowsEverything) {
  EXPECT_GT(left(old_group("job", "9223372036854771712", "300")), std::size_t{1} << 60);
}

TEST_F(MemoryLimit, OfAContainerThatDoesNotSeeItsGroupIsThatOfTheRoot) {
  old_group("", "1000", "300");
  EXPECT_EQ(left((root() / "docker" / "0123").string()), 700u);
}

TEST_F(MemoryLimit, OrTheMachineLeavesTheLeast) {
  const std::filesystem::path proc = root() / "proc";
  std::filesystem::create_directories(proc / "self");
  EXPECT_EQ(memory_left(proc.string(), root().string()), std::nullopt);
  std::ofstream(proc / "self" / "cgroup") << "0::/job\n";
  group("job", "1000", "300");
  EXPECT_EQ(memory_left(proc.string(), root().string()), 700u);
  std::ofstream(proc / "meminfo") << "MemAvailable: 1 kB\n";
  EXPECT_EQ(memory_left(proc.string(), root().string()), 700u);
  group("job", "9000", "300");
  EXPECT_EQ(memory_left(proc.string(), root().string()), 1024u);
}

TEST(AllocationLocks, AreHeldByOneAtATimeAndEndWithTheirOwner) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const std::string path = folder / "lock";
  std::ofstream{path};
  int reached[2];
  ASSERT_EQ(::pipe(reached), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    const AllocationLock lock(path.c_str());
    const char held = lock.held() ? 1 : 0;
    (void)!::write(reached[1], &held, 1);
    ::pause();
  }
  char held = 0;
  ASSERT_EQ(::read(reached[0], &held, 1), 1);
  EXPECT_EQ(held, 1);
  EXPECT_FALSE(AllocationLock(path.c_str(), std::chrono::milliseconds(0)).held());
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  EXPECT_TRUE(AllocationLock(path.c_str()).held());
  EXPECT_TRUE(AllocationLock(path.c_str(), std::chrono::milliseconds(0)).held()) << "the one before has ended";
  ::close(reached[0]);
  ::close(reached[1]);
  std::filesystem::remove_all(folder);
}

TEST(AllocationLocks, AreThereOnThisMachine) {
  EXPECT_TRUE(AllocationLock().held());
  EXPECT_FALSE(AllocationLock("/no/such/file").held());
}

TEST(MemoryLimitOfThisProcess, AllowsNothingToBeAllocated) {
  EXPECT_NO_THROW(check_memory_limit(0));
}

TEST(MemoryOfTheMachine, IsReadFromTheLineOfWhatIsAvailable) {
  const std::filesystem::path folder = testing::make_temporary_folder();
  const std::string path = (folder / "meminfo").string();
  std::ofstream(path) << "MemTotal:       1000 kB\nHugePages_Total:       0\nMemAvailable:    300 kB\nCached: 5 kB\n";
  EXPECT_EQ(memory_available(path), 300u * 1024);
  std::ofstream(path) << "MemTotal:       1000 kB\n";
  EXPECT_EQ(memory_available(path), std::nullopt);
  EXPECT_EQ(memory_available((folder / "none").string()), std::nullopt);
  std::filesystem::remove_all(folder);
}

TEST(MemoryOfTheMachine, IsNotExceeded) {
  try {
    check_memory_limit(std::size_t{1} << 60);
    FAIL() << "no machine has an exbibyte";
  } catch (const SystemFailure& failure) {
    EXPECT_NE(std::string(failure.what()).find("bytes left"), std::string::npos) << failure.what();
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm
