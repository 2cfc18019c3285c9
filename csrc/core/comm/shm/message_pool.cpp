#include "core/comm/shm/message_pool.h"

#include <algorithm>
#include <bit>

#include "core/base/round_up.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kSmallestBlockBytes = 64 * 1024;

// Rounded up to eighths of the next power of two, so that blocks can be reused and waste little.
std::size_t block_bytes(std::size_t size_bytes) {
  const std::size_t wanted = std::max(size_bytes, kSmallestBlockBytes);
  return round_up(wanted, std::bit_ceil(wanted) / 8);
}

}  // namespace

void MessagePool::reclaim() {
  for (Entry& entry : entries_) {
    if (entry.user != nullptr) {
      const MessageState state = entry.user->state.load(std::memory_order_acquire);
      entry.user = state == MessageState::kFree || state == MessageState::kRefused ? nullptr : entry.user;
    }
  }
}

MessagePool::Entry* MessagePool::smallest_idle(std::size_t size_bytes) {
  Entry* best = nullptr;
  for (Entry& entry : entries_) {
    const bool fits = entry.user == nullptr && entry.size_bytes() >= size_bytes;
    if (fits && (best == nullptr || entry.size_bytes() < best->size_bytes())) {
      best = &entry;
    }
  }
  return best;
}

void MessagePool::drop_idle() {
  const auto idle =
      std::partition(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.user != nullptr; });
  std::for_each(idle, entries_.end(), [this](const Entry& entry) { arena_->release(entry.block.id); });
  entries_.erase(idle, entries_.end());
}

MessagePool::Entry* MessagePool::add(std::size_t size_bytes, bool beyond_limit) {
  const std::size_t wanted_bytes = block_bytes(size_bytes);
  std::size_t total_bytes = 0;
  std::size_t used_bytes = 0;
  for (const Entry& entry : entries_) {
    total_bytes += entry.size_bytes();
    used_bytes += entry.user != nullptr ? entry.size_bytes() : 0;
  }
  if (!beyond_limit && used_bytes > 0 && used_bytes + wanted_bytes > limit_bytes_) {
    return nullptr;
  }
  if (total_bytes + wanted_bytes > limit_bytes_) {
    drop_idle();
  }
  entries_.push_back({arena_->create(wanted_bytes)});
  return &entries_.back();
}

std::byte* MessagePool::take(Message& message, std::size_t size_bytes, bool beyond_limit) {
  Entry* entry = smallest_idle(size_bytes);
  if (entry == nullptr) {
    entry = add(size_bytes, beyond_limit);
  }
  if (entry == nullptr) {
    return nullptr;
  }
  entry->user = &message;
  message.segment = entry->block.id;
  message.offset_bytes = 0;
  return entry->block.segment->data();
}

}  // namespace accelerate_cpp::comm
