#include "core/comm/shm/block_collective.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "core/base/round_up.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kLine = 64;
// Notes in the operation where the blocks lie in the arena, when they lie there one right after the other.
void place_row_in_arena(const Group& group, Operation& operation, const std::vector<ConstMemoryView>& blocks) {
  const std::byte* begin = nullptr;
  std::size_t size_bytes = 0;
  for (const ConstMemoryView& block : blocks) {
    if (block.count == 0) {
      continue;
    }
    if (begin != nullptr && block.bytes() != begin + size_bytes) {
      return;
    }
    begin = begin == nullptr ? block.bytes() : begin;
    size_bytes += block.size_bytes();
  }
  group.place_in_arena(operation, begin, size_bytes);
}

}  // namespace

bool gives_one_block(CallKind kind) {
  return kind == CallKind::kBroadcast || kind == CallKind::kAllGather || kind == CallKind::kGather ||
         kind == CallKind::kReduce;
}

void BlockCollective::run(Group& group, Staging& staging, const Operation& operation, const Blocks& blocks,
                          const Call& call) {
  Operation placed = operation;
  place_row_in_arena(group, placed, blocks.given);
  group.run(placed, call, [&] { BlockCollective(group, staging, placed, blocks, call.deadline).run(); });
}

BlockCollective::BlockCollective(Group& group, Staging& staging, const Operation& operation, const Blocks& blocks,
                                 const Deadline& deadline)
    : group_(group),
      staging_(staging),
      operation_(operation),
      blocks_(blocks),
      deadline_(deadline),
      element_bytes_(element_size(operation.signature.dtype)),
      one_block_(gives_one_block(operation.signature.kind)),
      sources_(static_cast<std::size_t>(group.size())) {}

void BlockCollective::set_counts() {
  std::vector<std::uint64_t> given(static_cast<std::size_t>(group_.size()), 0);
  for (std::size_t r = 0; r < given.size() && !blocks_.given.empty(); ++r) {
    if (!one_block_) {
      given[r] = blocks_.given[r].count;
    } else if (blocks_.takers[r]) {
      given[r] = blocks_.given[0].count;
    }
  }
  group_.set_counts(given, blocks_.taken);
}

void BlockCollective::read_counts() {
  const auto ranks = static_cast<std::size_t>(group_.size());
  // No sum of blocks, each rounded up to lines, exceeds what a size can be.
  const std::uint64_t most = std::numeric_limits<std::size_t>::max() / 2 / ranks / element_bytes_;
  bytes_.reserve(ranks * ranks);
  for (int giver = 0; giver < group_.size(); ++giver) {
    for (int taker = 0; taker < group_.size(); ++taker) {
      const std::uint64_t count = group_.given(giver, taker);
      const bool own = taker == group_.rank();
      const std::uint64_t limit = own ? blocks_.taken[static_cast<std::size_t>(giver)] : most;
      if (own ? count != limit : count > limit) {
        throw damaged_memory(group_.hooks().name_of(giver) + " gives " + std::to_string(count) + " elements to " +
                             group_.hooks().name_of(taker) + ", expected " + (own ? "" : "at most ") +
                             std::to_string(limit));
      }
      bytes_.push_back(static_cast<std::size_t>(count) * element_bytes_);
    }
  }
}

void BlockCollective::run() {
  set_counts();
  if (!operation_.in_arena) {
    copy_to_small();
  }
  group_.announce();
  group_.await_announcements(deadline_);
  read_counts();
  if (all_small()) {
    consume_small();
  } else if (all_in_arena()) {
    consume_in_place();
  } else {
    group_.take_in_segments();
    run_staged();
  }
}

std::size_t BlockCollective::offset(int giver, int taker, std::size_t alignment) const {
  std::size_t result = 0;
  for (int r = 0; r < taker && !one_block_; ++r) {
    result += round_up(bytes(giver, r), alignment);
  }
  return result;
}

std::size_t BlockCollective::small_bytes(int giver) const {
  std::size_t longest = 0;
  for (int r = 0; r < group_.size(); ++r) {
    longest = std::max(longest, bytes(giver, r));
  }
  return one_block_ ? longest : offset(giver, group_.size(), kLine);
}

void BlockCollective::copy_to_small() {
  std::size_t total = 0;
  for (const ConstMemoryView& block : blocks_.given) {
    total += round_up(block.size_bytes(), kLine);
  }
  if (total > kSmallBytes) {
    return;
  }
  staging_.await_free_small(deadline_);
  std::byte* place = staging_.small(group_.rank(), group_.next_sequence());
  for (const ConstMemoryView& block : blocks_.given) {
    if (block.count > 0) {
      std::memcpy(place, block.data, block.size_bytes());
      place += round_up(block.size_bytes(), kLine);
    }
  }
}

bool BlockCollective::all_small() const {
  for (int r = 0; r < group_.size(); ++r) {
    if (group_.announced(r).in_arena || small_bytes(r) > kSmallBytes) {
      return false;
    }
  }
  return true;
}

bool BlockCollective::all_in_arena() const {
  for (int r = 0; r < group_.size(); ++r) {
    if (!group_.announced(r).in_arena && small_bytes(r) > 0) {
      return false;
    }
  }
  return true;
}

const void* BlockCollective::own_block(std::size_t begin) const {
  const std::size_t length = bytes(group_.rank(), group_.rank());
  if (begin >= length) {
    return nullptr;
  }
  return blocks_.given[one_block_ ? 0 : static_cast<std::size_t>(group_.rank())].bytes() + begin;
}

void BlockCollective::consume_small() {
  std::size_t longest = 0;
  for (int r = 0; r < group_.size(); ++r) {
    const std::size_t length = bytes(r, group_.rank());
    longest = std::max(longest, length);
    const bool own = r == group_.rank();
    const std::byte* const place = staging_.small(r, group_.next_sequence() - 1) + offset(r, group_.rank(), kLine);
    sources_[static_cast<std::size_t>(r)] = length == 0 ? nullptr : own ? own_block(0) : place;
  }
  if (longest > 0) {
    blocks_.consume(sources_.data(), 0, longest);
  }
}

void BlockCollective::consume_in_place() {
  std::size_t longest = 0;
  for (int r = 0; r < group_.size(); ++r) {
    const std::size_t length = bytes(r, group_.rank());
    longest = std::max(longest, length);
    const void*& source = sources_[static_cast<std::size_t>(r)];
    source = nullptr;
    if (length > 0 && r == group_.rank()) {
      source = own_block(0);
    } else if (length > 0) {
      source = group_.operand(r, offset(r, group_.rank(), 1), length, deadline_);
    }
  }
  if (longest > 0) {
    blocks_.consume(sources_.data(), 0, longest);
  }
  const std::uint64_t piece = staging_.finish_in_place();
  if (operation_.in_arena) {
    staging_.await_all_consumed(piece, deadline_);
  }
}

void BlockCollective::stage(std::size_t piece) {
  const std::size_t begin = piece * piece_bytes_;
  if (!blocks_.given.empty()) {
    staging_.await_free_input(first_ + piece, deadline_);
  }
  std::byte* const slot = staging_.input(group_.rank(), first_ + piece);
  for (std::size_t b = 0; b < blocks_.given.size(); ++b) {
    const std::size_t length = blocks_.given[b].size_bytes();
    if (begin < length && (one_block_ || b != static_cast<std::size_t>(group_.rank()))) {
      std::memcpy(slot + b * piece_bytes_, blocks_.given[b].bytes() + begin, std::min(piece_bytes_, length - begin));
    }
  }
  staging_.publish_staged(first_ + piece);
}

void BlockCollective::consume_piece(std::size_t piece) {
  const std::size_t begin = piece * piece_bytes_;
  const int rank = group_.rank();
  const std::size_t slot_offset = one_block_ ? 0 : static_cast<std::size_t>(rank) * piece_bytes_;
  std::size_t length = 0;
  for (int r = 0; r < group_.size(); ++r) {
    const void*& source = sources_[static_cast<std::size_t>(r)];
    const std::size_t left = bytes(r, rank) > begin ? bytes(r, rank) - begin : 0;
    length = std::max(length, std::min(left, piece_bytes_));
    source = nullptr;
    if (left > 0 && r == rank) {
      source = own_block(begin);
    } else if (left > 0) {
      staging_.await_staged(r, first_ + piece, deadline_);
      source = staging_.input(r, first_ + piece) + slot_offset;
    }
  }
  if (length > 0) {
    blocks_.consume(sources_.data(), begin, length);
  }
  staging_.publish_consumed(first_ + piece);
}

void BlockCollective::run_staged() {
  for (int giver = 0; giver < group_.size(); ++giver) {
    for (int taker = 0; taker < group_.size(); ++taker) {
      longest_bytes_ = std::max(longest_bytes_, bytes(giver, taker));
    }
  }
  const std::size_t blocks = one_block_ ? 1 : static_cast<std::size_t>(group_.size());
  const std::size_t slot_bytes = piece_bytes_for(longest_bytes_ * blocks);
  piece_bytes_ = slot_bytes / blocks / kLine * kLine;
  first_ = staging_.begin(slot_bytes);
  const std::size_t num_pieces = (longest_bytes_ + piece_bytes_ - 1) / piece_bytes_;
  for (std::size_t k = 0; k < num_pieces + 1; ++k) {
    if (k < num_pieces) {
      stage(k);
    }
    if (k >= 1) {
      consume_piece(k - 1);
    }
  }
  staging_.finish(num_pieces);
}

}  // namespace accelerate_cpp::comm
