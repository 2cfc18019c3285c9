// The staging memory of a rank: bounce memory for operands that do not lie in an arena.
//
//   input    pieces of large operands, or whole operands of small operations
//   output   reduced slices that peers collect
//
// Both are rings of slots. They are larger than a core's second-level cache: writing a line that a peer still has in
// its cache takes several times as long as the copy itself, because the core must first fetch it back.
//
// Pieces are numbered over the life of the group; RankControl.staged and .consumed count them. A slot of the input may
// be filled again when every rank has consumed the piece that it held. A slot of the output may be filled for piece k
// once every rank has staged piece k, because a rank stages piece k only after it has collected piece k - 3, and there
// are more than three slots. A small operand goes into the input of its sequence number before the operation is
// announced: then all ranks must have consumed the pieces of the operations before. When an operation has been
// announced by all ranks, none of them is in an earlier one, and all slots are free.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {

inline constexpr std::size_t kSmallBytes = 64 * 1024;
inline constexpr std::size_t kPieceBytes = 512 * 1024;
inline constexpr std::size_t kRingBytes = 2 * 1024 * 1024;
inline constexpr std::size_t kStagingBytes = 2 * kRingBytes;
static_assert(kRingBytes > 3 * kPieceBytes, "three pieces are under way at once");

// How much of an operand of `total_bytes` travels at once: enough pieces that copying and reducing overlap, but none so
// small that waiting for each other dominates.
inline std::size_t piece_bytes_for(std::size_t total_bytes) {
  constexpr std::size_t kSmallestPieceBytes = 128 * 1024;
  return std::clamp(total_bytes / 8 / 64 * 64, kSmallestPieceBytes, kPieceBytes);
}

class Staging {
 public:
  explicit Staging(Group& group) : group_(group) {}

  // Where the operand of operation number `sequence` goes, at most kSmallBytes.
  std::byte* small(int rank, std::uint64_t sequence) {
    return group_.extra(rank) + sequence % (kRingBytes / kSmallBytes) * kSmallBytes;
  }
  std::byte* input(int rank, std::uint64_t piece) { return group_.extra(rank) + piece % num_slots_ * slot_bytes_; }
  std::byte* output(int rank, std::uint64_t piece) { return input(rank, piece) + kRingBytes; }

  // Begins an operation with pieces of at most `slot_bytes`, the same on every rank, up to kPieceBytes. Returns the
  // number of its first piece; finish(n) ends the operation after n pieces.
  std::uint64_t begin(std::size_t slot_bytes) {
    slot_bytes_ = slot_bytes;
    num_slots_ = kRingBytes / slot_bytes;
    return pieces_;
  }
  void finish(std::uint64_t num_pieces) { pieces_ += num_pieces; }

  // Ends an operation on operands that were used where they lie: one piece, of which nothing is staged. Returns its
  // number; once all ranks have consumed it, nobody uses this rank's operand any more.
  std::uint64_t finish_in_place() {
    const std::uint64_t piece = pieces_++;
    publish_staged(piece);
    publish_consumed(piece);
    return piece;
  }

  void publish_staged(std::uint64_t piece) { publish(group_.own().staged, piece); }
  void publish_consumed(std::uint64_t piece) { publish(group_.own().consumed, piece); }

  void await_staged(int peer, std::uint64_t piece, const Deadline& deadline) {
    await(peer, group_.control(peer).staged, piece, deadline);
  }
  void await_all_staged(std::uint64_t piece, const Deadline& deadline) {
    for_each_peer([&](int peer) { await_staged(peer, piece, deadline); });
  }
  void await_all_consumed(std::uint64_t piece, const Deadline& deadline) {
    for_each_peer([&](int peer) { await(peer, group_.control(peer).consumed, piece, deadline); });
  }

  // Before input(own rank, piece) is filled.
  void await_free_input(std::uint64_t piece, const Deadline& deadline) {
    if (piece >= num_slots_) {
      await_all_consumed(piece - num_slots_, deadline);
    }
  }
  // Before small(own rank, ...) is filled.
  void await_free_small(const Deadline& deadline) {
    if (pieces_ > 0) {
      await_all_consumed(pieces_ - 1, deadline);
    }
  }

 private:
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t piece) {
    counter.store(piece + 1, std::memory_order_release);
    group_.own().event.notify();
  }

  void await(int peer, std::atomic<std::uint64_t>& counter, std::uint64_t piece, const Deadline& deadline) {
    group_.wait(peer, deadline, [&] { return counter.load(std::memory_order_acquire) > piece; });
  }

  template <class Action>
  void for_each_peer(const Action& action) {
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer != group_.rank()) {
        action(peer);
      }
    }
  }

  Group& group_;
  std::uint64_t pieces_ = 0;
  std::size_t slot_bytes_ = kPieceBytes;
  std::size_t num_slots_ = kRingBytes / kPieceBytes;
};

}  // namespace accelerate_cpp::comm
