#include "core/comm/shm/arena.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/shm/arenas.h"
#include "core/comm/shm/shared_segments.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Pair;

constexpr auto kLong = std::chrono::milliseconds(100000);
constexpr std::size_t kShared = SharedSegments::kOwnSegmentBytes;

std::ptrdiff_t count_open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

TEST(Arenas, FindMemoryFromTheFirstToTheLastByteOfASegment) {
  const Pair pair;
  const Arena::Block block = pair.first->create(1000);
  std::byte* const data = block.segment->data();
  const std::size_t size_bytes = block.segment->size_bytes();
  const auto whole = pair.first->find(data, size_bytes);
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(whole->segment, block.id);
  EXPECT_EQ(whole->offset_bytes, 0u);
  const auto last = pair.first->find(data + size_bytes - 1, 1);
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->offset_bytes, size_bytes - 1);
}

TEST(Arenas, FindNothingThatReachesBeyondASegment) {
  const Pair pair;
  const Arena::Block block = pair.first->create(1000);
  std::byte* const data = block.segment->data();
  const std::size_t size_bytes = block.segment->size_bytes();
  EXPECT_FALSE(pair.first->find(data - 1, 1));
  EXPECT_FALSE(pair.first->find(data - 1, 2));
  EXPECT_FALSE(pair.first->find(data, size_bytes + 1));
  EXPECT_FALSE(pair.first->find(data + size_bytes, 1));
  EXPECT_FALSE(pair.first->find(data + size_bytes - 1, 2));
  EXPECT_FALSE(pair.first->find(data + 1, std::numeric_limits<std::size_t>::max()));
}

TEST(Arenas, FindNothingOutsideTheirSegments) {
  const Pair pair;
  const int on_the_stack = 0;
  EXPECT_FALSE(pair.first->find(&on_the_stack, sizeof(on_the_stack)));
  EXPECT_FALSE(pair.first->find(nullptr, 0));
  const Arena::Block block = pair.first->create(1000);
  EXPECT_FALSE(pair.first->find(&on_the_stack, sizeof(on_the_stack)));
  EXPECT_FALSE(pair.first->find(nullptr, 0));
  EXPECT_FALSE(pair.second->find(block.segment->data(), 1)) << "it is the peer's";
}

TEST(Arenas, TellSegmentsApart) {
  const Pair pair;
  std::vector<Arena::Block> blocks;
  for (std::size_t i = 0; i < 10; ++i) {
    blocks.push_back(pair.first->create(5000 * (i + 1)));
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i].id, i) << "numbered in the order of creation";
    const auto place = pair.first->find(blocks[i].segment->data() + 4999, 1);
    ASSERT_TRUE(place.has_value());
    EXPECT_EQ(place->segment, blocks[i].id);
    EXPECT_EQ(place->offset_bytes, 4999u);
  }
}

TEST(Arenas, ForgetWhatIsReleased) {
  const Pair pair;
  const Arena::Block kept = pair.first->create(100);
  const Arena::Block released = pair.first->create(100);
  pair.first->release(released.id);
  EXPECT_FALSE(pair.first->find(released.segment->data(), 1));
  EXPECT_TRUE(pair.first->find(kept.segment->data(), 1));
  pair.first->release(released.id);
  pair.first->release(12345);
  EXPECT_TRUE(pair.first->find(kept.segment->data(), 1));
  EXPECT_EQ(pair.first->create(100).id, 2u) << "numbers are not used again";
}

TEST(Arenas, GiveNoSegmentOfAPeerBeforeItHasArrived) {
  const Pair pair;
  EXPECT_EQ(pair.second->of_peer(0, 0), nullptr);
  EXPECT_EQ(pair.second->await_of_peer(0, 0, std::chrono::milliseconds(0)), nullptr);
  const Arena::Block block = pair.first->create(100);
  const auto segment = pair.second->of_peer(0, block.id);
  ASSERT_NE(segment, nullptr);
  segment->data()[3] = std::byte{9};
  EXPECT_EQ(block.segment->data()[3], std::byte{9});
  EXPECT_EQ(pair.second->of_peer(0, block.id), segment);
  EXPECT_EQ(pair.second->of_peer(0, block.id + 1), nullptr);
}

TEST(Arenas, WaitForASegmentThatArrives) {
  const Pair pair;
  std::thread creator([&] { pair.first->create(100); });
  EXPECT_NE(pair.second->await_of_peer(0, 0, kLong), nullptr);
  creator.join();
}

TEST(Arenas, UnmapWhatAPeerHasReleased) {
  const Pair pair;
  std::weak_ptr<Segment> memory;
  {
    const Arena::Block block = pair.first->create(100);
    memory = block.segment;
    ASSERT_NE(pair.second->of_peer(0, block.id), nullptr);
    pair.first->release(block.id);
  }
  EXPECT_FALSE(memory.expired()) << "the peer has not yet seen the release";
  pair.second->poll();
  EXPECT_FALSE(memory.expired()) << "the owner has not yet seen that the peer has let go";
  pair.first->poll();
  EXPECT_TRUE(memory.expired());
  EXPECT_EQ(pair.second->of_peer(0, 0), nullptr);
}

TEST(Arenas, SpendFewDescriptorsOnSegmentsThatNobodyHasAskedFor) {
  const Pair pair;
  std::vector<Arena::Block> blocks;
  const auto before = count_open_descriptors();
  for (int i = 0; i < 100; ++i) {
    blocks.push_back(pair.first->create(100));
    blocks.back().segment->data()[0] = static_cast<std::byte>(i);
    pair.second->poll();
  }
  EXPECT_LE(count_open_descriptors(), before + 4);
  for (int i = 0; i < 100; ++i) {
    const auto segment = pair.second->of_peer(0, blocks[static_cast<std::size_t>(i)].id);
    ASSERT_NE(segment, nullptr);
    EXPECT_EQ(segment->data()[0], static_cast<std::byte>(i));
  }
}

TEST(Arenas, CloseTheDescriptorOfASegmentThatIsReleasedBeforeItWasMapped) {
  const Pair pair;
  const auto before = count_open_descriptors();
  pair.first->release(pair.first->create(100).id);
  pair.second->poll();
  EXPECT_EQ(count_open_descriptors(), before);
  EXPECT_EQ(pair.second->of_peer(0, 0), nullptr);
}

TEST(Arenas, KeepNoDescriptorOnceThePeersHaveBeenTold) {
  const Pair pair;
  const auto before = count_open_descriptors();
  const Arena::Block one = pair.first->create(100);
  const Arena::Block other = pair.second->create(100);
  EXPECT_EQ(count_open_descriptors(), before);
  EXPECT_NE(pair.second->of_peer(0, one.id), nullptr);
  EXPECT_NE(pair.first->of_peer(1, other.id), nullptr);
  EXPECT_EQ(count_open_descriptors(), before);
}

TEST(Arenas, CloseDescriptorsThatNobodyAskedForWhenTheyEnd) {
  const auto before = count_open_descriptors();
  {
    const Pair pair;
    const Arena::Block block = pair.first->create(100);
    pair.second->poll();
  }
  EXPECT_EQ(count_open_descriptors(), before);
}

TEST(Arenas, AdoptMemoryOfTheProcessWhenTheyFirstMeetIt) {
  const Pair pair;
  const std::shared_ptr<Buffer> buffer = SharedSegments::of_process().allocate(kShared);
  auto* const data = static_cast<std::byte*>(buffer->data());
  const auto place = pair.first->find(data + 640, 100);
  ASSERT_TRUE(place.has_value());
  const auto seen_by_peer = pair.second->of_peer(0, place->segment);
  ASSERT_NE(seen_by_peer, nullptr);
  data[640] = std::byte{7};
  EXPECT_EQ(seen_by_peer->data()[place->offset_bytes], std::byte{7});
  EXPECT_EQ(pair.first->find(data, 1)->segment, place->segment) << "it is announced once";
  EXPECT_EQ(pair.first->create(1).id, place->segment + 1);
  EXPECT_TRUE(pair.second->find(data, 1)) << "each arena has its own name for it";
}

TEST(Arenas, ReleaseMemoryThatTheProcessHasFreed) {
  const Pair pair;
  const auto before = count_open_descriptors();
  std::shared_ptr<Buffer> buffer = SharedSegments::of_process().allocate(kShared);
  const auto place = pair.first->find(buffer->data(), 1);
  ASSERT_TRUE(place.has_value());
  buffer.reset();
  pair.second->poll();
  EXPECT_EQ(count_open_descriptors(), before + 1) << "what the peer has been sent keeps the memory alive";
  pair.first->poll();
  pair.second->poll();
  EXPECT_EQ(count_open_descriptors(), before);
  EXPECT_EQ(pair.second->of_peer(0, place->segment), nullptr);
}

TEST(Arenas, TellFreedMemoryOfTheProcessFromWhatComesInItsPlace) {
  const Pair pair;
  std::uint32_t last = 0;
  for (std::uint32_t round = 0; round < 20; ++round) {
    const std::shared_ptr<Buffer> buffer = SharedSegments::of_process().allocate(kShared);
    const auto place = pair.first->find(buffer->data(), kShared);
    ASSERT_TRUE(place.has_value());
    EXPECT_TRUE(round == 0 || place->segment > last);
    last = place->segment;
  }
}

TEST(Arenas, SendAnnouncementsThatDidNotFitIntoTheSocketLater) {
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  const int smallest = 1;  // the kernel rounds up to its own minimum
  ASSERT_EQ(::setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &smallest, sizeof(smallest)), 0);
  std::vector<std::unique_ptr<Channel>> channels(2);
  channels[1] = std::make_unique<Channel>(sockets[0]);
  Arena sender(std::move(channels));
  channels.resize(2);
  channels[0] = std::make_unique<Channel>(sockets[1]);
  Arena receiver(std::move(channels));
  constexpr std::uint32_t kNumSegments = 100;
  const auto before = count_open_descriptors();
  for (std::uint32_t id = 0; id < kNumSegments; ++id) {
    sender.create(1).segment->data()[0] = static_cast<std::byte>(id);
  }
  EXPECT_GT(count_open_descriptors(), before) << "the socket took " << kNumSegments << " messages at once";
  for (std::uint32_t id = 0; id < kNumSegments; ++id) {
    std::shared_ptr<Segment> segment;
    while (!(segment = receiver.of_peer(0, id))) {
      sender.poll();
    }
    EXPECT_EQ(segment->data()[0], static_cast<std::byte>(id));
  }
  EXPECT_EQ(count_open_descriptors(), before);
}

TEST(Arenas, SeeThatAPeerHasClosedItsEnd) {
  Pair pair;
  pair.second->poll();
  EXPECT_FALSE(pair.second->peer_closed(0));
  pair.first.reset();
  pair.second->poll();
  EXPECT_TRUE(pair.second->peer_closed(0));
}

TEST(Arenas, GiveASegmentOfAPeerThatHasEndedSince) {
  Pair pair;
  pair.first->create(100).segment->data()[0] = std::byte{4};
  pair.first.reset();
  const auto segment = pair.second->of_peer(0, 0);
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(segment->data()[0], std::byte{4});
  pair.second->poll();
  EXPECT_TRUE(pair.second->peer_closed(0));
}

TEST(Arenas, KnowTheProcessOfAPeer) {
  const Pair pair;
  EXPECT_EQ(pair.first->peer_pid(1), ::getpid());
}

TEST(Arenas, CanBeUsedByManyThreadsAtOnce) {
  const Pair pair;
  std::atomic<int> running{3};
  std::vector<std::thread> owners;
  for (int t = 0; t < 3; ++t) {
    owners.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        const Arena::Block block = pair.first->create(100);
        const auto place = pair.first->find(block.segment->data(), 100);
        EXPECT_TRUE(place && place->segment == block.id);
        pair.first->release(block.id);
      }
      --running;
    });
  }
  while (running > 0) {
    pair.second->poll();
    pair.first->poll();
  }
  for (std::thread& owner : owners) {
    owner.join();
  }
  EXPECT_EQ(pair.first->create(1).id, 300u);
}

TEST(OwnedBlocks, AreReleasedWhenTheyEnd) {
  const Pair pair;
  auto block = std::make_unique<OwnedBlock>(pair.first, 100);
  const std::shared_ptr<Segment> memory = block->segment();
  EXPECT_EQ(block->id(), 0u);
  EXPECT_TRUE(pair.first->find(memory->data(), 100));
  EXPECT_EQ(pair.second->of_peer(0, 0), memory);
  block.reset();
  EXPECT_FALSE(pair.first->find(memory->data(), 100));
  EXPECT_EQ(memory.use_count(), 3) << "this one, and both arenas' until the peer has seen the release";
  pair.second->poll();
  pair.first->poll();
  EXPECT_EQ(memory.use_count(), 2) << "this one keeps the memory from being given back";
}

TEST(OwnedBlocks, KeepTheirArenaAlive) {
  Pair pair;
  auto block = std::make_unique<OwnedBlock>(pair.first, 100);
  pair.first.reset();
  pair.second->poll();
  EXPECT_FALSE(pair.second->peer_closed(0));
  EXPECT_NE(pair.second->of_peer(0, block->id()), nullptr);
  block.reset();
  pair.second->poll();
  EXPECT_TRUE(pair.second->peer_closed(0));
}

}  // namespace
}  // namespace accelerate_cpp::comm
