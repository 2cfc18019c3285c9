// What becomes of the memory of segments that were released.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/comm/ranks.h"
#include "core/comm/shm/arena.h"
#include "core/comm/shm/arenas.h"
#include "core/comm/shm/mesh.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Pair;

constexpr auto kLong = std::chrono::milliseconds(100000);

// Pages of the process that have memory in [data, data + size_bytes).
std::size_t count_resident_pages(std::byte* data, std::size_t size_bytes) {
  std::vector<unsigned char> pages(size_bytes / 4096);
  EXPECT_EQ(::mincore(data, size_bytes, pages.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

// Another mapping of the segment in this process, as a forked child has one.
std::byte* map_again(const Segment& segment) {
  void* const again = ::mremap(segment.data(), 0, segment.size_bytes(), MREMAP_MAYMOVE);
  EXPECT_NE(again, MAP_FAILED);
  return static_cast<std::byte*>(again);
}

TEST(Arenas, GiveMemoryBackThatForkedChildrenStillHaveMapped) {
  constexpr std::size_t kBytes = 64 * 4096;
  const Pair pair;
  std::byte* child = nullptr;
  std::shared_ptr<Segment> view;  // of the owner's: a gradient that the program has kept
  std::uint32_t id = 0;
  {
    const Arena::Block block = pair.first->create(kBytes);
    view = block.segment;
    id = block.id;
    child = map_again(*block.segment);
    std::memset(child, 1, kBytes);
    ASSERT_NE(pair.second->of_peer(0, id), nullptr);
    pair.first->release(id);
  }
  pair.first->poll();
  EXPECT_EQ(child[0], std::byte{1}) << "the peer has it mapped";
  pair.second->poll();
  pair.first->poll();
  EXPECT_EQ(child[0], std::byte{1}) << "the owner uses it";
  EXPECT_EQ(count_resident_pages(child, kBytes), 64u);
  view.reset();
  pair.first->poll();
  EXPECT_EQ(count_resident_pages(child, kBytes), 0u);
  EXPECT_EQ(child[0], std::byte{0});
  ::munmap(child, kBytes);
}

TEST(Arenas, KeepWhatAPeerUsesAfterItsOwnerHasReleasedIt) {
  // Ranks that are processes: those of one process share the mapping.
  testing::run_processes(2, [](Store& store, int rank) {
    Arena arena(connect_mesh(store, rank, 2, testing::soon(), WaitHooks()));
    if (rank == 0) {
      const std::uint32_t id = [&] {
        const Arena::Block block = arena.create(4096);
        block.segment->data()[0] = std::byte{1};
        return block.id;
      }();
      store.get("mapped", testing::soon());
      arena.release(id);
      arena.poll();
      store.set("released", "");
      store.get("read", testing::soon());
      return;
    }
    std::shared_ptr<Segment> segment;
    while (!segment) {
      segment = arena.await_of_peer(0, 0, kLong);
    }
    store.set("mapped", "");
    store.get("released", testing::soon());
    arena.poll();
    EXPECT_EQ(segment->data()[0], std::byte{1});
    store.set("read", "");
  });
}

TEST(Arenas, GiveNothingBackInAForkedChild) {
  const Pair pair;
  const Arena::Block block = pair.first->create(4096);
  block.segment->data()[0] = std::byte{1};
  std::byte* const data = block.segment->data();
  const pid_t child = ::fork();
  if (child == 0) {
    const_cast<std::shared_ptr<Segment>&>(block.segment).reset();
    pair.first->release(block.id);
    pair.first->poll();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(data[0], std::byte{1});
}

}  // namespace
}  // namespace accelerate_cpp::comm
