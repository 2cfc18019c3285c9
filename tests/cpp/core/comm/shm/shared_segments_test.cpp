#include "core/comm/shm/shared_segments.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/operands.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

using testing::soon;

constexpr std::size_t kLarge = std::size_t{2} << 20;
static_assert(kLarge >= SharedSegments::kOwnSegmentBytes);

SharedSegments& segments() {
  return SharedSegments::of_process();
}

std::byte* bytes_of(const std::shared_ptr<Buffer>& buffer) {
  return static_cast<std::byte*>(buffer->data());
}

bool are_all(const std::byte* bytes, std::size_t count, int value) {
  return std::all_of(bytes, bytes + count, [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

std::set<int> open_descriptors() {
  std::set<int> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    result.insert(std::stoi(entry.path().filename()));
  }
  return result;
}

// How many segments this process has mapped.
std::size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("accelerate_cpp") != std::string::npos ? 1 : 0;
  }
  return count;
}

// How many sockets have something that this process has not read.
int count_unread_sockets() {
  int count = 0;
  for (const int descriptor : open_descriptors()) {
    struct stat status{};
    pollfd entry{descriptor, POLLIN, 0};
    const bool is_socket = ::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
    count += is_socket && ::poll(&entry, 1, 0) > 0 ? 1 : 0;
  }
  return count;
}

TEST(SharedSegments, AreFoundByAnyAddressInThem) {
  const std::shared_ptr<Buffer> large = segments().allocate(kLarge);
  const SharedSegments::Found found = segments().find(bytes_of(large) + 100, kLarge - 100);
  ASSERT_NE(found.segment, nullptr);
  EXPECT_EQ(found.segment->data() + found.offset_bytes, bytes_of(large) + 100);
  EXPECT_EQ(segments().find(bytes_of(large) + 100, found.segment->size_bytes()).segment, nullptr)
      << "reaches beyond the end";
  EXPECT_EQ(segments().find(&found, sizeof(found)).segment, nullptr) << "lies on the stack";
  EXPECT_EQ(segments().find(nullptr, 0).segment, nullptr);
}

TEST(SharedSegments, AreSharedByManySmallAllocations) {
  const std::set<int> before = open_descriptors();
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::set<Segment*> used;
  for (std::size_t i = 0; i < 1000; ++i) {
    buffers.push_back(segments().allocate(1000));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers.back()->data()) % 64, 0u);
    used.insert(segments().find(buffers.back()->data(), 1000).segment.get());
  }
  EXPECT_LE(used.size(), 2u) << "a megabyte lies in the segment that was in use, and in one more at most";
  EXPECT_LE(open_descriptors().size(), before.size() + 1);
}

TEST(SharedSegments, BelongToOneLargeAllocationEach) {
  const std::shared_ptr<Buffer> one = segments().allocate(kLarge);
  const std::shared_ptr<Buffer> other = segments().allocate(kLarge);
  EXPECT_NE(segments().find(one->data(), 1).segment, segments().find(other->data(), 1).segment);
  EXPECT_EQ(segments().find(one->data(), 1).offset_bytes, 0u);
}

TEST(SharedSegments, AreFreedWithTheLastReference) {
  const std::set<int> descriptors = open_descriptors();
  const std::size_t mappings = count_mappings();
  std::shared_ptr<Buffer> buffer = segments().allocate(kLarge);
  const std::byte* const address = bytes_of(buffer);
  EXPECT_EQ(count_mappings(), mappings + 1);
  std::shared_ptr<Buffer> another_reference = buffer;
  buffer.reset();
  EXPECT_NE(segments().find(address, 1).segment, nullptr);
  another_reference.reset();
  EXPECT_EQ(segments().find(address, 1).segment, nullptr);
  EXPECT_EQ(count_mappings(), mappings);
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(SharedSegments, AreNotTakenForEarlierOnesAtTheSameAddress) {
  std::set<const void*> addresses;
  std::weak_ptr<Segment> before;
  constexpr std::size_t kRounds = 50;
  for (std::size_t round = 0; round < kRounds; ++round) {
    const std::shared_ptr<Buffer> buffer = segments().allocate(kLarge * (1 + round % 2));
    const SharedSegments::Found found = segments().find(buffer->data(), kLarge * (1 + round % 2));
    ASSERT_NE(found.segment, nullptr);
    EXPECT_TRUE(before.expired());
    before = found.segment;
    addresses.insert(buffer->data());
  }
  EXPECT_LT(addresses.size(), kRounds) << "no address was used again: the test has not seen what it is about";
}

TEST(SharedSegments, AreZeroAgainWhenSmallAllocationsUseThemAnew) {
  std::set<const void*> addresses;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<Buffer>> buffers;
    for (int i = 0; i < 10; ++i) {
      buffers.push_back(segments().allocate(5000));
      EXPECT_TRUE(are_all(bytes_of(buffers.back()), 5000, 0));
      std::memset(buffers.back()->data(), 0xff, 5000);
      addresses.insert(buffers.back()->data());
    }
  }
  EXPECT_LE(addresses.size(), 20u) << "space whose allocations have all gone is used again";
}

TEST(SharedSegments, GiveEveryThreadItsOwnMemory) {
  std::vector<std::thread> threads;
  for (int thread = 1; thread <= 4; ++thread) {
    threads.emplace_back([thread] {
      for (std::size_t i = 0; i < 200; ++i) {
        const std::size_t size_bytes = i % 50 == 0 ? kLarge : 1 + 37 * i;
        const std::shared_ptr<Buffer> buffer = segments().allocate(size_bytes);
        EXPECT_TRUE(are_all(bytes_of(buffer), size_bytes, 0));
        std::memset(buffer->data(), thread, size_bytes);
        EXPECT_NE(segments().find(buffer->data(), size_bytes).segment, nullptr);
        EXPECT_TRUE(are_all(bytes_of(buffer), size_bytes, thread));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(SharedSegments, OfAForkedChildAreItsOwn) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  const std::shared_ptr<Buffer> before = segments().allocate(100);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::shared_ptr<Buffer> own = segments().allocate(100);
    std::memset(own->data(), 0xff, 100);
    ::_exit(0);
  }
  EXPECT_EQ(testing::wait_process(child), 0);
  EXPECT_TRUE(are_all(bytes_of(segments().allocate(100)), 100, 0));
}

std::shared_ptr<ShmCommunicator> connect(Store& store, int rank, int size) {
  return ShmCommunicator::connect(store, rank, size, soon(), {});
}

// Fills `count` floats with a value that rank `rank` has in round `round`.
void fill(const std::shared_ptr<Buffer>& buffer, std::size_t count, int value) {
  std::fill_n(static_cast<float*>(buffer->data()), count, static_cast<float>(value));
}

TEST(SharedSegmentsInGroups, ServeTwoGroupsAtOnce) {
  constexpr std::size_t kCount = kLarge / sizeof(float);
  testing::run_threads(3, [&](Store& store, int rank) {
    const auto all = connect(store, rank, 3);
    const auto pair = all->split(rank == 2 ? -1 : 0, 0, soon());
    const std::shared_ptr<Buffer> buffer = segments().allocate(kLarge);
    const MemoryView view{buffer->data(), kCount, DType::kFloat32};
    for (int round = 0; round < 3; ++round) {
      fill(buffer, kCount, rank + 1);
      all->all_reduce(view, ReduceOp::kSum, soon());
      EXPECT_EQ(testing::differences(view, 0, [](std::size_t) { return 6.0; }), 0u);
      if (pair) {
        pair->all_reduce(view, ReduceOp::kSum, soon());
        EXPECT_EQ(testing::differences(view, 0, [](std::size_t) { return 12.0; }), 0u);
      }
    }
    all->barrier(soon());
  });
}

TEST(SharedSegmentsInGroups, MayBeFreedAndAllocatedAgainBetweenOperations) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  testing::run_processes(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    std::set<const void*> addresses;
    constexpr int kRounds = 30;
    for (int round = 0; round < kRounds; ++round) {
      // Two sizes, so that what comes next is not always found where its predecessor was.
      const std::size_t count = kLarge / sizeof(float) * static_cast<std::size_t>(1 + round % 3 / 2);
      const std::shared_ptr<Buffer> buffer = communicator->allocate(count * sizeof(float));
      addresses.insert(buffer->data());
      fill(buffer, count, round + rank);
      const MemoryView view{buffer->data(), count, DType::kFloat32};
      communicator->all_reduce(view, ReduceOp::kSum, soon());
      EXPECT_EQ(testing::differences(view, 0, [round](std::size_t) { return 2.0 * round + 1; }), 0u);
    }
    EXPECT_LT(addresses.size(), static_cast<std::size_t>(kRounds));
  });
}

TEST(SharedSegmentsInGroups, AreUnmappedByPeersSoonAfterTheirOwnerHasFreedThem) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  testing::run_processes(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    const auto meet_often = [&] {
      for (int i = 0; i < 300; ++i) {
        communicator->barrier(soon());
      }
    };
    meet_often();  // what forming the group needed has gone then
    const std::size_t mappings = count_mappings();
    const std::set<int> descriptors = open_descriptors();
    {
      const std::shared_ptr<Buffer> buffer = communicator->allocate(kLarge);
      const MemoryView view{buffer->data(), kLarge, DType::kUInt8};
      communicator->all_reduce(view, ReduceOp::kSum, soon());
      EXPECT_EQ(count_mappings(), mappings + 2) << "this rank's and the peer's";
    }
    meet_often();
    EXPECT_EQ(count_mappings(), mappings);
    EXPECT_EQ(open_descriptors(), descriptors);
    communicator->barrier(soon());
  });
}

// What nobody fetches from a socket stays in memory, though its owner has freed it.
TEST(SharedSegmentsInGroups, DoNotPileUpInSocketsWhenOnlyOneRankUsesThem) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  testing::run_processes(2, [](Store& store, int rank) {
    const auto communicator = connect(store, rank, 2);
    const std::set<int> descriptors = open_descriptors();
    std::vector<std::byte> ordinary(kLarge);
    for (int round = 0; round < 10; ++round) {
      const std::shared_ptr<Buffer> shared = rank == 0 ? communicator->allocate(kLarge) : nullptr;
      const MemoryView view{shared ? shared->data() : ordinary.data(), kLarge, DType::kUInt8};
      communicator->all_reduce(view, ReduceOp::kMax, soon());
      if (rank == 1) {  // rank 0 is sent no memory, only word of what the other has let go of
        EXPECT_EQ(count_unread_sockets(), 0) << "in round " << round;
      }
      EXPECT_LE(open_descriptors().size(), descriptors.size() + 2);
      communicator->barrier(soon());
    }
  });
}

// Sums 300 tensors over groups that are made one after another.
void use_many_segments(Store& store, int rank) {
  constexpr int kSegments = 300;
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (int i = 0; i < kSegments; ++i) {
    buffers.push_back(segments().allocate(SharedSegments::kOwnSegmentBytes));
    std::fill_n(reinterpret_cast<std::int32_t*>(bytes_of(buffers.back())), 4096, i + rank);
  }
  const auto first = ShmCommunicator::connect(store, rank, 2, soon(), WaitHooks());
  std::vector<std::shared_ptr<Communicator>> groups = {first};
  for (int group = 0; group < 3; ++group) {
    for (int i = 0; i < kSegments; ++i) {
      auto* const values = reinterpret_cast<std::int32_t*>(bytes_of(buffers[static_cast<std::size_t>(i)]));
      groups.back()->all_reduce({values, 4096, DType::kInt32}, ReduceOp::kMax, soon());
      EXPECT_EQ(values[0], i + 1);
      EXPECT_EQ(values[4095], i + 1);
      groups.back()->barrier(soon());
      std::fill_n(values, 4096, i + rank);
    }
    groups.push_back(first->split(0, rank, soon()));
  }
}

TEST(SharedSegments, AreNotLimitedByTheLimitOfOpenFiles) {
  testing::run_processes(2, [](Store& store, int rank) {
    const rlimit few{256, 256};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    use_many_segments(store, rank);
  });
}

TEST(SharedSegments, RaiseTheLimitOfOpenFilesBeforeTheyGiveUpDescriptors) {
  testing::run_processes(2, [](Store& store, int rank) {
    const rlimit few{256, 2048};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    use_many_segments(store, rank);
    rlimit now{};
    ::getrlimit(RLIMIT_NOFILE, &now);
    EXPECT_EQ(now.rlim_cur, 2048u);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
