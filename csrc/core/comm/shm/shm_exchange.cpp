// The three ways in which ShmCommunicator moves blocks between ranks: in one step, in place, and piece by piece.
#include <algorithm>
#include <cstring>

#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {

void ShmCommunicator::run(const Exchange& exchange, const Deadline& deadline) {
  group_->run(exchange.operation, [&] {
    if (exchange.block_bytes * exchange.num_blocks <= kSmallBytes) {
      return exchange_small(exchange, deadline);
    }
    group_->announce();
    group_->await_announcements(deadline);
    const int root = exchange.operation.root;
    const bool only_root_offers = exchange.operation.kind == OperationKind::kBroadcast;
    if (exchange.in_arena && announced_in_arena(only_root_offers ? root : 0, only_root_offers ? root : size() - 1)) {
      exchange_in_arena(exchange, deadline);
    } else {
      exchange_staged(exchange, deadline);
    }
  });
}

void ShmCommunicator::exchange_small(const Exchange& exchange, const Deadline& deadline) {
  const std::uint64_t sequence = group_->next_sequence();
  std::byte* const slot = staging_.small(rank(), sequence);
  for (std::size_t b = 0; b < exchange.put.size() && exchange.block_bytes > 0; ++b) {
    std::memcpy(slot + b * exchange.block_bytes, exchange.put[b], exchange.block_bytes);
  }
  group_->announce();
  group_->await_announcements(deadline);
  if (exchange.block_bytes == 0 || exchange.first_source > exchange.last_source) {
    return;
  }
  const std::size_t own_block = exchange.num_blocks == 1 ? 0 : static_cast<std::size_t>(rank()) * exchange.block_bytes;
  std::vector<const void*> sources(static_cast<std::size_t>(size()));
  for (int r = exchange.first_source; r <= exchange.last_source; ++r) {
    sources[static_cast<std::size_t>(r)] = staging_.small(r, sequence) + own_block;
  }
  exchange.consume(sources.data(), 0, exchange.block_bytes);
}

void ShmCommunicator::exchange_in_arena(const Exchange& exchange, const Deadline& deadline) {
  std::vector<const void*> sources(static_cast<std::size_t>(size()));
  for (int r = exchange.first_source; r <= exchange.last_source; ++r) {
    sources[static_cast<std::size_t>(r)] = r == rank() ? exchange.put[0] : peer_operand(r, deadline);
  }
  if (exchange.first_source <= exchange.last_source) {
    exchange.consume(sources.data(), 0, exchange.block_bytes);
  }
  const std::uint64_t piece = staging_.first_piece();
  staging_.publish_staged(piece);
  staging_.publish_consumed(piece);
  if (!exchange.put.empty()) {
    staging_.await_all_consumed(piece, deadline);
  }
  staging_.finish(1);
}

void ShmCommunicator::exchange_staged(const Exchange& exchange, const Deadline& deadline) {
  const std::size_t piece_bytes = kPieceBytes / static_cast<std::size_t>(exchange.num_blocks) / 64 * 64;
  const std::size_t num_pieces = (exchange.block_bytes + piece_bytes - 1) / piece_bytes;
  const std::uint64_t first = staging_.first_piece();
  const std::size_t own_block = exchange.num_blocks == 1 ? 0 : static_cast<std::size_t>(rank());
  std::vector<const void*> sources(static_cast<std::size_t>(size()));

  const auto stage = [&](std::size_t k) {
    const std::size_t begin = k * piece_bytes;
    const std::size_t length = std::min(piece_bytes, exchange.block_bytes - begin);
    if (!exchange.put.empty()) {
      staging_.await_free_input(first + k, deadline);
      for (std::size_t b = 0; b < exchange.put.size(); ++b) {
        std::memcpy(staging_.input(rank(), first + k) + b * piece_bytes, exchange.put[b] + begin, length);
      }
    }
    staging_.publish_staged(first + k);
  };
  const auto consume = [&](std::size_t k) {
    const std::size_t begin = k * piece_bytes;
    const std::size_t length = std::min(piece_bytes, exchange.block_bytes - begin);
    for (int r = exchange.first_source; r <= exchange.last_source; ++r) {
      if (r != rank()) {
        staging_.await_staged(r, first + k, deadline);
      }
      sources[static_cast<std::size_t>(r)] = staging_.input(r, first + k) + own_block * piece_bytes;
    }
    if (exchange.first_source <= exchange.last_source) {
      exchange.consume(sources.data(), begin, length);
    }
    staging_.publish_consumed(first + k);
  };

  for (std::size_t k = 0; k < num_pieces + 1; ++k) {
    if (k < num_pieces) {
      stage(k);
    }
    if (k >= 1) {
      consume(k - 1);
    }
  }
  staging_.finish(num_pieces);
}

}  // namespace accelerate_cpp::comm
