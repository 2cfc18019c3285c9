// One operation in which ranks give blocks of bytes to each other: gathers, scatters, broadcast, all-to-all, and the
// reductions that are not all-reduce.
//
// There are three ways to move blocks. All ranks make the same choice, from what all have announced:
//   small     what a rank gives fits into its small slot: copied in, announced, read
//   in place  every rank that gives something gives it from its arena: read where it lies, then all wait once
//   staged    piece by piece through the input slots, one piece being copied in while the one before is read
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/call.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/staging.h"

namespace accelerate_cpp::comm {

// This rank's part.
struct Blocks {
  // What it gives: nothing, or one block per rank, or (kinds for which gives_one_block() holds) the same block to all
  // ranks whose entry in `takers` is set.
  std::vector<ConstMemoryView> given;
  std::vector<bool> takers;
  // Elements it takes from each rank.
  std::vector<std::uint64_t> taken;
  // Takes bytes [begin, begin + length) of the blocks given to this rank: sources[r] points at that range of rank r's
  // block, null where that has ended or rank r gives nothing. `length` fits the longest block; shorter ones end
  // earlier.
  std::function<void(const void* const* sources, std::size_t begin, std::size_t length)> consume;
};

// Whether a rank gives one and the same block to all that take from it.
bool gives_one_block(CallKind kind);

class BlockCollective {
 public:
  // Runs `operation`, whose dtype and kind say how the blocks are to be read. Returns when this rank has taken
  // everything and what it gives may be overwritten.
  static void run(Group& group, Staging& staging, const Operation& operation, const Blocks& blocks, const Call& call);

 private:
  BlockCollective(Group& group, Staging& staging, const Operation& operation, const Blocks& blocks,
                  const Deadline& deadline);

  void run();
  void set_counts();
  // Copies what all have announced to give, once: a peer whose memory is damaged may change it. Throws SystemFailure
  // unless this rank is given what it takes, and the rest is possible.
  void read_counts();
  std::size_t bytes(int giver, int taker) const {
    return bytes_[static_cast<std::size_t>(giver * group_.size() + taker)];
  }
  // Bytes before the block for `taker` among the blocks of `giver`, each rounded up to `alignment`.
  std::size_t offset(int giver, int taker, std::size_t alignment) const;
  // Bytes of all blocks of `giver` in its small slot.
  std::size_t small_bytes(int giver) const;
  void copy_to_small();
  bool all_small() const;
  bool all_in_arena() const;
  void consume_small();
  void consume_in_place();
  void run_staged();
  void stage(std::size_t piece);
  void consume_piece(std::size_t piece);
  // This rank's own block for itself, from `begin` on; null when there is none.
  const void* own_block(std::size_t begin) const;

  Group& group_;
  Staging& staging_;
  const Operation& operation_;
  const Blocks& blocks_;
  const Deadline& deadline_;
  const std::size_t element_bytes_;
  const bool one_block_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> bytes_;  // by giver and taker
  // While staged:
  std::uint64_t first_ = 0;
  std::size_t piece_bytes_ = 0;
  std::size_t longest_bytes_ = 0;
};

}  // namespace accelerate_cpp::comm
