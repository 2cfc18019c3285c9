#include "core/comm/shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/channel.h"

namespace accelerate_cpp::comm {
namespace {

const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

std::ptrdiff_t count_open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

// Mappings of segments in this process.
int count_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:accelerate_cpp") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(Segments, AreZeroFilledAndAtLeastAsLargeAsAskedFor) {
  for (const std::size_t size_bytes : {std::size_t{1}, kPage - 1, kPage, kPage + 1, 40 * kPage + 3}) {
    const auto segment = Segment::create(size_bytes);
    EXPECT_GE(segment->size_bytes(), size_bytes);
    EXPECT_LT(segment->size_bytes(), size_bytes + kPage);
    EXPECT_TRUE(std::all_of(segment->data(), segment->data() + segment->size_bytes(),
                            [](std::byte byte) { return byte == std::byte{0}; }));
    std::memset(segment->data(), 0xff, segment->size_bytes());
  }
}

TEST(Segments, MayHaveNoBytes) {
  EXPECT_NE(Segment::create(0)->data(), nullptr);
}

TEST(Segments, StartAtAPage) {
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(Segment::create(1)->data()) % kPage, 0u);
}

TEST(Segments, AreSharedByThreadRanksThroughOneMapping) {
  const auto segment = Segment::create(100);
  const auto mapped = Segment::map(::dup(segment->descriptor()));
  EXPECT_EQ(mapped->data(), segment->data());
  EXPECT_EQ(mapped->size_bytes(), segment->size_bytes());
}

TEST(Segments, HaveMemoryOfTheirOwnEach) {
  const auto one = Segment::create(kPage);
  const auto other = Segment::create(kPage);
  std::memset(one->data(), 1, kPage);
  EXPECT_EQ(other->data()[0], std::byte{0});
  EXPECT_NE(one->data(), other->data());
}

TEST(Segments, LiveAsLongAsOneRankHoldsThem) {
  auto segment = Segment::create(100);
  const auto mapped = Segment::map(::dup(segment->descriptor()));
  segment->data()[99] = std::byte{7};
  segment.reset();
  EXPECT_EQ(mapped->data()[99], std::byte{7});
}

TEST(Segments, ReachAnotherProcessThroughTheirDescriptor) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  // The child is started first, so that it inherits nothing of the segment.
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(sockets[0]);
    Channel channel(sockets[1]);
    std::shared_ptr<Segment> segment;
    while (!segment && !channel.closed()) {
      channel.wait_readable(std::chrono::milliseconds(100000));
      channel.drain([&](std::uint32_t, int descriptor) { segment = Segment::map(descriptor); }, [](std::uint32_t) {});
    }
    const bool arrived = segment && segment->size_bytes() == kPage && segment->data()[5] == std::byte{42};
    if (arrived) {
      segment->data()[6] = std::byte{43};
    }
    ::_exit(arrived ? 0 : 1);
  }
  ::close(sockets[1]);
  Channel channel(sockets[0]);
  const auto segment = Segment::create(kPage);
  segment->data()[5] = std::byte{42};
  channel.announce(0, segment->descriptor());
  EXPECT_TRUE(channel.flush());
  segment->close_descriptor();
  EXPECT_EQ(testing::wait_process(child), 0);
  EXPECT_EQ(segment->data()[6], std::byte{43});
}

TEST(Segments, CloseTheDescriptorThatTheyAreMappedFrom) {
  const auto segment = Segment::create(1);
  const int copy = ::dup(segment->descriptor());
  const auto mapped = Segment::map(copy);
  EXPECT_LT(::fcntl(copy, F_GETFD), 0);
  EXPECT_GE(::fcntl(segment->descriptor(), F_GETFD), 0);
}

TEST(Segments, WorkWithoutTheirDescriptor) {
  const auto segment = Segment::create(1);
  const int descriptor = segment->descriptor();
  segment->close_descriptor();
  EXPECT_EQ(segment->descriptor(), -1);
  EXPECT_LT(::fcntl(descriptor, F_GETFD), 0);
  segment->close_descriptor();
  segment->data()[0] = std::byte{1};
  EXPECT_EQ(segment->data()[0], std::byte{1});
}

TEST(Segments, HaveNoNameInAnyFileSystem) {
  const auto segment = Segment::create(1);
  struct stat status{};
  ASSERT_EQ(::fstat(segment->descriptor(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0u);
}

TEST(Segments, MayBeOpenedByTheirOwnerOnly) {
  const auto segment = Segment::create(1);
  struct stat status{};
  ASSERT_EQ(::fstat(segment->descriptor(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(status.st_uid, ::geteuid());
}

TEST(Segments, AreNotHandedToProgramsThatAreStarted) {
  const auto segment = Segment::create(1);
  EXPECT_NE(::fcntl(segment->descriptor(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Segments, LeaveNothingBehind) {
  const auto descriptors = count_open_descriptors();
  const int mappings = count_mappings();
  for (int i = 0; i < 20; ++i) {
    const auto segment = Segment::create(100);
    const auto mapped = Segment::map(::dup(segment->descriptor()));
    EXPECT_EQ(count_mappings(), mappings + 1);
  }
  EXPECT_EQ(count_mappings(), mappings);
  EXPECT_EQ(count_open_descriptors(), descriptors);
}

TEST(Segments, CannotBeMappedFromWhatIsNoDescriptor) {
  EXPECT_THROW(Segment::map(-1), SystemFailure);
}

TEST(Segments, LargerThanAnyFileAreRefused) {
  const auto descriptors = count_open_descriptors();
  for (const std::size_t size_bytes : {std::size_t{1} << 63, ~std::size_t{0} - kPage, ~std::size_t{0}}) {
    EXPECT_THROW(Segment::create(size_bytes), SystemFailure) << size_bytes;
  }
  EXPECT_EQ(count_open_descriptors(), descriptors);
}

// Runs `check` in a forked child in which one resource is limited.
template <class Check>
void expect_in_limited_child(__rlimit_resource resource, rlim_t limit, const Check& check) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit lowered{limit, limit};
    ::_exit(::setrlimit(resource, &lowered) == 0 && check() ? 0 : 1);
  }
  EXPECT_EQ(testing::wait_process(child), 0);
}

bool is_refused_without_a_trace(std::size_t size_bytes, const std::string& reason) {
  const auto descriptors = count_open_descriptors();
  try {
    Segment::create(size_bytes);
  } catch (const SystemFailure& failure) {
    return std::string(failure.what()).find(reason) != std::string::npos && count_open_descriptors() == descriptors;
  }
  return false;
}

TEST(Segments, BeyondTheAllowedFileSizeAreRefusedAndLeaveNoDescriptor) {
  expect_in_limited_child(RLIMIT_FSIZE, 16 * kPage, [] {
    Segment::create(16 * kPage);
    return is_refused_without_a_trace(17 * kPage, "allocating " + std::to_string(17 * kPage) + " bytes");
  });
}

TEST(Segments, BeyondTheAddressSpaceAreRefusedAndLeaveNoDescriptor) {
  std::size_t used_pages = 0;
  ASSERT_TRUE(std::ifstream("/proc/self/statm") >> used_pages);
  expect_in_limited_child(RLIMIT_AS, used_pages * kPage + (16 << 20),
                          [] { return is_refused_without_a_trace(64 << 20, "mapping"); });
}

// What processes of this test have left, in memory that they share.
std::atomic<std::int64_t>* left_for_all = nullptr;

TEST(Segments, AreAllocatedByOneProcessAfterAnotherSoThatNoneIsGivenWhatAnotherHasChecked) {
  constexpr int kProcesses = 4;
  void* const shared = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  left_for_all = new (shared) std::atomic<std::int64_t>[3];
  MemoryFiles files = MemoryFiles::of_system();
  files.check = [](std::size_t size_bytes) {
    if (left_for_all[0].load() < static_cast<std::int64_t>(size_bytes)) {
      throw SystemFailure("too little", ENOMEM);
    }
    for (int i = 0; i < 100; ++i) {
      ::sched_yield();
    }
  };
  files.allocate = [](int descriptor, off_t offset, off_t size_bytes) {
    if (left_for_all[0].fetch_sub(size_bytes) < size_bytes) {
      left_for_all[1].fetch_add(1);
    }
    return ::posix_fallocate(descriptor, offset, size_bytes);
  };
  for (int round = 0; round < 20; ++round) {
    left_for_all[0].store(static_cast<std::int64_t>(10 * kPage));
    testing::run_processes(kProcesses, [&](Store&, int) {
      try {
        const auto segment = Segment::create(6 * kPage, files);
        left_for_all[2].fetch_add(1);
      } catch (const SystemFailure&) {
      }
    });
  }
  EXPECT_EQ(left_for_all[1].load(), 0) << "processes were given more than there was";
  EXPECT_EQ(left_for_all[2].load(), 20) << "one in each round had room";
  ::munmap(shared, kPage);
}

}  // namespace
}  // namespace accelerate_cpp::comm
