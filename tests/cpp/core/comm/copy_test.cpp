#include "core/comm/copy.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

constexpr Residency kResidencies[] = {Residency::kCached, Residency::kStreamed};

std::vector<std::byte> numbered(std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (std::size_t i = 0; i < size_bytes; ++i) {
    bytes[i] = static_cast<std::byte>((i * 167 + i / 251) & 0xff);
  }
  return bytes;
}

TEST(Copy, CopiesEverySizeAtEveryAlignmentAndTouchesNothingBeside) {
  constexpr std::size_t kRoom = 1024;
  const std::vector<std::byte> source = numbered(kRoom);
  for (const Residency residency : kResidencies) {
    for (const std::size_t size : {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 640, 801}) {
      for (std::size_t to = 1; to <= 65; ++to) {
        const std::size_t from = to * 7 % 64;
        std::vector<std::byte> expected(kRoom, std::byte{0x5a});
        std::vector<std::byte> destination = expected;
        std::memcpy(expected.data() + to, source.data() + from, size);
        copy(destination.data() + to, source.data() + from, size, residency);
        ASSERT_EQ(destination, expected) << size << " bytes from " << from << " to " << to;
      }
    }
  }
}

TEST(Copy, CopiesMoreThanTheCachesHold) {
  const std::vector<std::byte> source = numbered((std::size_t{20} << 20) + 77);
  for (const Residency residency : kResidencies) {
    std::vector<std::byte> destination(source.size());
    copy(destination.data() + 3, source.data() + 1, source.size() - 3, residency);
    EXPECT_EQ(std::memcmp(destination.data() + 3, source.data() + 1, source.size() - 3), 0);
  }
}

TEST(Copy, SeveralCopiesAreCompleteHoweverManyThreadsDivideThem) {
  const std::vector<std::byte> source = numbered((std::size_t{15} << 20) + 77);
  for (const int num_threads : {-1, 1, 2, 3, 100}) {
    for (const std::size_t whole : {std::size_t{1000}, source.size()}) {
      std::vector<std::byte> destination(source.size() + 1);
      const std::size_t cut = whole / 3;
      copy_all({{destination.data(), source.data(), cut},
                {nullptr, nullptr, 0},
                {destination.data() + cut, source.data() + cut, whole - cut}},
               num_threads);
      EXPECT_EQ(std::memcmp(destination.data(), source.data(), whole), 0) << num_threads << " threads";
      EXPECT_EQ(destination[whole], std::byte{0});
    }
  }
  copy_all({}, 2);
}

TEST(Copy, TakesNullPointersForNothing) {
  for (const Residency residency : kResidencies) {
    copy(nullptr, nullptr, 0, residency);
  }
}

TEST(Copy, IsCompleteForAThreadThatSeesALaterReleaseStore) {
  const std::vector<std::byte> source = numbered(std::size_t{1} << 16);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> destination(source.size());
    std::atomic<bool> copied{false};
    std::thread reader([&] {
      copied.wait(false, std::memory_order_acquire);
      EXPECT_EQ(destination, source);
    });
    copy(destination.data(), source.data(), source.size(), Residency::kStreamed);
    copied.store(true, std::memory_order_release);
    copied.notify_one();
    reader.join();
  }
}

TEST(Copy, StreamsResultsThatDoNotStayInTheCachesOnly) {
  EXPECT_EQ(residency_of(0), Residency::kCached);
  EXPECT_EQ(residency_of(std::size_t{1} << 20), Residency::kCached);
  EXPECT_EQ(residency_of(std::size_t{25} << 20), Residency::kStreamed);
  EXPECT_EQ(residency_of(std::size_t{100} << 20), Residency::kStreamed);
}

}  // namespace
}  // namespace accelerate_cpp::comm
