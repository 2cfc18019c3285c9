// Shared memory that belongs to the process and to no group. Arenas find it by address and hand it to their own peers.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "core/base/background.h"
#include "core/comm/communicator.h"
#include "core/comm/shm/segment.h"

namespace accelerate_cpp::comm {

// Thread-safe.
class SharedSegments {
 public:
  // Smaller allocations share segments of kSlabBytes, since every segment costs a file descriptor. At most a
  // 1 / kShareOfDescriptors of the limit of open files is spent on them; then that of the oldest segment is given up:
  // groups that have not met the segment before use it like any other memory.
  static constexpr std::size_t kSlabBytes = std::size_t{4} << 20;
  static constexpr std::size_t kOwnSegmentBytes = std::size_t{1} << 20;

  static constexpr std::size_t kShareOfDescriptors = 4;

  static SharedSegments& of_process();

  // Zero-filled, aligned to 64 bytes.
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes);

  struct Found {
    std::shared_ptr<Segment> segment;  // null when the memory is not shared
    std::size_t offset_bytes = 0;
  };
  // The segment that [data, data + size_bytes) lies in.
  Found find(const void* data, std::size_t size_bytes);

 private:
  struct Slab {
    std::shared_ptr<Segment> segment;
    std::size_t used_bytes = 0;
    OwnerProcess owner;  // a forked child shares the bytes with its parent, and must not hand them out again
    // Parts in use. The segment's reference count would not order what their owners did before they released them.
    std::shared_ptr<std::atomic<int>> num_parts;
  };
  class Part;

  SharedSegments() = default;
  std::shared_ptr<Segment> create_locked(std::size_t size_bytes);
  // Makes room for the descriptor of one more segment.
  void limit_descriptors_locked();

  std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<Segment>> by_address_;
  std::deque<std::weak_ptr<Segment>> with_descriptor_;  // from the oldest on
  std::atomic<bool> any_{false};                        // whether anything was ever allocated
  Slab slab_;
};

}  // namespace accelerate_cpp::comm
