#include "core/comm/shm/staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/comm/shm/groups.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::meet;
using testing::passed;
using testing::soon;
using ::testing::ThrowsMessage;

// Runs `body` on each of `size` ranks with a group that has room for staging.
template <class Body>
void run_groups(int size, const Body& body) {
  testing::run_groups(size, kStagingBytes, body);
}

// Checks that the slots are aligned, apart, and within the memory behind the control block.
void check_layout(Group& group, std::vector<std::byte*> slots, std::size_t slot_bytes) {
  std::sort(slots.begin(), slots.end());
  std::byte* end = group.extra(0);
  for (std::byte* const begin : slots) {
    EXPECT_GE(begin, end);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 64, 0u);
    end = begin + slot_bytes;
    std::memset(begin, 1, slot_bytes);
  }
  EXPECT_LE(end, group.extra(0) + kStagingBytes);
}

TEST(StagingSlots, DoNotOverlapAndFillTheMemoryBehindTheControlBlock) {
  run_groups(1, [](Group& group) {
    Staging staging(group);
    for (const std::size_t slot_bytes : {kPieceBytes, piece_bytes_for(1), kPieceBytes - 64}) {
      staging.begin(slot_bytes);
      std::vector<std::byte*> slots;
      for (std::uint64_t i = 100; i < 100 + kRingBytes / slot_bytes; ++i) {
        slots.push_back(staging.input(0, i));
        slots.push_back(staging.output(0, i));
      }
      EXPECT_GE(slots.size(), 2 * 4u) << "three pieces are under way while a fourth is collected";
      check_layout(group, slots, slot_bytes);
    }
    std::vector<std::byte*> small;
    for (std::uint64_t i = 100; i < 100 + kRingBytes / kSmallBytes; ++i) {
      small.push_back(staging.small(0, i));
    }
    check_layout(group, small, kSmallBytes);
  });
}

TEST(StagingSlots, AreUsedInTurnSoThatEachIsLeftAloneForAsLongAsPossible) {
  run_groups(1, [](Group& group) {
    Staging staging(group);
    staging.begin(kPieceBytes);
    const std::uint64_t slots = kRingBytes / kPieceBytes;
    const std::uint64_t small_slots = kRingBytes / kSmallBytes;
    for (std::uint64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(staging.small(0, i), staging.small(0, i + small_slots));
      EXPECT_EQ(staging.input(0, i), staging.input(0, i + slots));
      EXPECT_EQ(staging.output(0, i), staging.output(0, i + slots));
    }
  });
}

TEST(StagingSlots, ShowPeersWhatARankHasPutIntoThem) {
  run_groups(2, [](Group& group) {
    Staging staging(group);
    const auto mark = static_cast<std::byte>(10 + group.rank());
    std::memset(staging.input(group.rank(), 0), static_cast<int>(mark), kPieceBytes);
    staging.publish_staged(0);
    const int peer = 1 - group.rank();
    staging.await_staged(peer, 0, soon());
    const std::byte* const slot = staging.input(peer, 0);
    const auto expected = static_cast<std::byte>(10 + peer);
    EXPECT_TRUE(std::all_of(slot, slot + kPieceBytes, [expected](std::byte byte) { return byte == expected; }));
    meet(group);
  });
}

TEST(StagingPieces, AreNumberedOnOverAllOperations) {
  run_groups(1, [](Group& group) {
    Staging staging(group);
    EXPECT_EQ(staging.begin(kPieceBytes), 0u);
    staging.finish(4);
    EXPECT_EQ(staging.begin(kPieceBytes), 4u);
    staging.finish(0);
    staging.finish(1);
    EXPECT_EQ(staging.begin(kPieceBytes), 5u);
  });
}

TEST(StagingPieces, AreThereOnceTheyOrLaterOnesHaveBeenPublished) {
  run_groups(2, [](Group& group) {
    Staging staging(group);
    if (group.rank() == 1) {
      staging.publish_staged(0);
      staging.publish_staged(1);
    }
    meet(group);
    if (group.rank() == 0) {
      EXPECT_NO_THROW(staging.await_staged(1, 0, passed()));
      EXPECT_NO_THROW(staging.await_all_staged(1, passed()));
      EXPECT_THAT([&] { staging.await_all_staged(2, passed()); }, ThrowsMessage<Timeout>(HasSubstr("rank 1")));
      EXPECT_THROW(staging.await_all_consumed(0, passed()), Timeout) << "staged is not consumed";
    }
    meet(group);
  });
}

TEST(StagingPieces, NeedEveryPeer) {
  run_groups(3, [](Group& group) {
    Staging staging(group);
    if (group.rank() == 1) {
      staging.publish_consumed(0);
    }
    meet(group);
    if (group.rank() == 0) {
      EXPECT_THAT([&] { staging.await_all_consumed(0, passed()); }, ThrowsMessage<Timeout>(HasSubstr("rank 2")));
    }
    meet(group);
    if (group.rank() == 2) {
      staging.publish_consumed(0);
    }
    meet(group);
    if (group.rank() == 0) {
      EXPECT_NO_THROW(staging.await_all_consumed(0, passed()));
    }
    meet(group);
  });
}

TEST(StagingInputs, AreFreeAgainOnceEveryPeerHasConsumedThePieceBefore) {
  run_groups(2, [](Group& group) {
    Staging staging(group);
    staging.begin(kPieceBytes);
    const std::uint64_t slots = kRingBytes / kPieceBytes;
    if (group.rank() == 0) {
      for (std::uint64_t piece = 0; piece < slots; ++piece) {
        EXPECT_NO_THROW(staging.await_free_input(piece, passed())) << "no piece has been there before";
      }
      EXPECT_THROW(staging.await_free_input(slots, passed()), Timeout);
    }
    meet(group);
    if (group.rank() == 1) {
      staging.publish_consumed(0);
    }
    meet(group);
    if (group.rank() == 0) {
      EXPECT_NO_THROW(staging.await_free_input(slots, passed()));
      EXPECT_THROW(staging.await_free_input(slots + 1, passed()), Timeout);
    }
    meet(group);
  });
}

TEST(StagingInputs, AreFreeForSmallOperandsOnceEveryPeerHasConsumedTheLastPiece) {
  run_groups(2, [](Group& group) {
    Staging staging(group);
    EXPECT_NO_THROW(staging.await_free_small(passed())) << "no piece has been there before";
    staging.finish(3);
    if (group.rank() == 0) {
      EXPECT_THROW(staging.await_free_small(passed()), Timeout);
    }
    meet(group);
    if (group.rank() == 1) {
      staging.publish_consumed(2);
    }
    meet(group);
    if (group.rank() == 0) {
      EXPECT_NO_THROW(staging.await_free_small(passed()));
    }
    meet(group);
  });
}

TEST(StagingInputs, OfManyPiecesArriveWholeWhoeverIsFaster) {
  constexpr std::uint64_t kPieces = 200;
  run_groups(3, [](Group& group) {
    Staging staging(group);
    for (std::uint64_t piece = 0; piece < kPieces; ++piece) {
      staging.await_free_input(piece, soon());
      std::memset(staging.input(group.rank(), piece), static_cast<int>((piece * 5 + group.rank()) & 0xff), 256);
      staging.publish_staged(piece);
      for (int peer = 0; peer < group.size(); ++peer) {
        if (peer != group.rank()) {
          staging.await_staged(peer, piece, soon());
          const std::byte* const slot = staging.input(peer, piece);
          const auto expected = static_cast<std::byte>((piece * 5 + static_cast<std::uint64_t>(peer)) & 0xff);
          EXPECT_TRUE(std::all_of(slot, slot + 256, [expected](std::byte byte) { return byte == expected; }))
              << "piece " << piece << " of rank " << peer;
        }
      }
      staging.publish_consumed(piece);
    }
    meet(group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
