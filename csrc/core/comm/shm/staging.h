// The staging slots of a rank: bounce memory for operands that do not lie in an arena.
//
//   small[2]   one per parity of the operation's sequence number: whole operands of small operations
//   input[3]   one per piece number modulo 3: pieces of large operands
//   output[3]  likewise: reduced slices that peers collect
//
// Pieces are numbered over the life of the group; RankControl.staged and .consumed count them. input[k % 3] may be
// filled again when every rank has consumed piece k - 3. output[k % 3] may be filled once every rank has staged piece
// k, because a rank stages piece k only after it has collected piece k - 3.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {

inline constexpr std::size_t kSmallBytes = 64 * 1024;
inline constexpr std::size_t kPieceBytes = 512 * 1024;
inline constexpr std::size_t kSlots = 3;
inline constexpr std::size_t kStagingBytes = 2 * kSmallBytes + 2 * kSlots * kPieceBytes;

// How much of an operand of `total_bytes` travels at once: enough pieces that copying and reducing overlap, but none so
// small that waiting for each other dominates.
inline std::size_t piece_bytes_for(std::size_t total_bytes) {
  constexpr std::size_t kSmallestPieceBytes = 128 * 1024;
  return std::clamp(total_bytes / 8 / 64 * 64, kSmallestPieceBytes, kPieceBytes);
}

class Staging {
 public:
  explicit Staging(Group& group) : group_(group) {}

  std::byte* small(int rank, std::uint64_t sequence) { return group_.extra(rank) + (sequence & 1) * kSmallBytes; }
  std::byte* input(int rank, std::uint64_t piece) { return slot(rank, piece % kSlots); }
  std::byte* output(int rank, std::uint64_t piece) { return slot(rank, kSlots + piece % kSlots); }

  // The number of the first piece of the current operation; finish(n) ends the operation after n pieces.
  std::uint64_t first_piece() const { return pieces_; }
  void finish(std::uint64_t num_pieces) { pieces_ += num_pieces; }

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
    if (piece >= kSlots) {
      await_all_consumed(piece - kSlots, deadline);
    }
  }

 private:
  std::byte* slot(int rank, std::size_t index) { return group_.extra(rank) + 2 * kSmallBytes + index * kPieceBytes; }

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
};

}  // namespace accelerate_cpp::comm
