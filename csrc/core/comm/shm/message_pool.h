// Blocks of shared memory that hold the data of messages until the receiver has copied them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/shm/arena.h"
#include "core/comm/shm/outbox.h"

namespace accelerate_cpp::comm {

// Not thread-safe.
class MessagePool {
 public:
  // Blocks in use are limited to `limit_bytes` together; a single one may be larger when no other is in use. Idle ones
  // are kept for later within the same limit.
  MessagePool(std::shared_ptr<Arena> arena, std::size_t limit_bytes)
      : arena_(std::move(arena)), limit_bytes_(limit_bytes) {}

  // Blocks whose messages have been received or refused are free again. Call this before a message is reused.
  void reclaim();

  // A block for `size_bytes` of data of `message`, whose segment and offset it fills in; null while the limit does not
  // allow another, unless `beyond_limit`. Throws SystemFailure when there is not enough memory.
  std::byte* take(Message& message, std::size_t size_bytes, bool beyond_limit = false);

 private:
  struct Entry {
    Arena::Block block;
    const Message* user = nullptr;

    std::size_t size_bytes() const { return block.segment->size_bytes(); }
  };

  Entry* smallest_idle(std::size_t size_bytes);
  Entry* add(std::size_t size_bytes, bool beyond_limit);
  void drop_idle();

  const std::shared_ptr<Arena> arena_;
  const std::size_t limit_bytes_;
  std::vector<Entry> entries_;
};

}  // namespace accelerate_cpp::comm
