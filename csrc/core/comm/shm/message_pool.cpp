#include "core/comm/shm/message_pool.h"

#include <algorithm>

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kSmallestBlockBytes = 64 * 1024;

// Powers of two up to 1 GiB, so that blocks fit again.
std::size_t block_bytes(std::size_t size_bytes) {
  std::size_t rounded = kSmallestBlockBytes;
  while (rounded < size_bytes && rounded < (std::size_t{1} << 30)) {
    rounded *= 2;
  }
  return std::max(rounded, size_bytes);
}

}  // namespace

void MessagePool::reclaim() {
  for (Entry& entry : entries_) {
    if (entry.user != nullptr && entry.user->state.load(std::memory_order_acquire) == MessageState::kFree) {
      entry.user = nullptr;
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

MessagePool::Entry* MessagePool::add(std::size_t size_bytes) {
  const std::size_t wanted_bytes = block_bytes(size_bytes);
  std::size_t total_bytes = 0;
  std::size_t used_bytes = 0;
  for (const Entry& entry : entries_) {
    total_bytes += entry.size_bytes();
    used_bytes += entry.user != nullptr ? entry.size_bytes() : 0;
  }
  if (used_bytes > 0 && used_bytes + wanted_bytes > limit_bytes_) {
    return nullptr;
  }
  if (total_bytes + wanted_bytes > limit_bytes_) {
    drop_idle();
  }
  entries_.push_back({arena_->create(wanted_bytes)});
  return &entries_.back();
}

std::byte* MessagePool::take(Message& message, std::size_t size_bytes) {
  Entry* entry = smallest_idle(size_bytes);
  if (entry == nullptr) {
    entry = add(size_bytes);
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
