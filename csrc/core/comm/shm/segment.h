// One piece of memory that several processes map: a file in memory without a name, so nothing is left behind however a
// process dies. Only its owner may open it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

// The system's ways to make files in memory; tests refuse some of them, as sandboxes do. The functions that open a file
// return its descriptor, or -1 with errno set.
struct MemoryFiles {
  int (*anonymous)();                                               // a file of no file system: memfd_create
  int (*unnamed)(const char* folder);                               // a file in `folder` that never has a name
  int (*unlinked)(const char* folder);                              // a file in `folder` that loses its name at once
  int (*allocate)(int descriptor, off_t offset, off_t size_bytes);  // posix_fallocate: returns the error, 0 for none
  void (*check)(std::size_t size_bytes);                            // check_memory_limit
  std::vector<std::string> folders;  // where to put files when anonymous ones are refused

  static const MemoryFiles& of_system();
};

class Segment {
 public:
  // Zero-filled memory of at least `size_bytes`, really allocated: no later write to it can fail. Where memfd_create is
  // refused, a nameless file in the first of files.folders that is a tmpfs takes its place. Throws SystemFailure when
  // the machine, the control group or that tmpfs has too little memory. Processes check and allocate one after another.
  static std::shared_ptr<Segment> create(std::size_t size_bytes, const MemoryFiles& files = MemoryFiles::of_system());

  // Maps the file behind `descriptor`, which another rank created, and closes the descriptor. Ranks that are threads of
  // one process share one mapping, so that a race detector sees them touch the same addresses.
  static std::shared_ptr<Segment> map(int descriptor);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

  // The descriptor to send to peers; -1 once closed or for a segment that was mapped.
  int descriptor() const;

  // The descriptor is no longer needed: it is closed once nobody has it pinned.
  void close_descriptor();

  // Keeps the descriptor open until unpin(); false when it has been closed.
  bool pin_descriptor();
  void unpin_descriptor();

  // Gives the memory back to the system while others, forked children above all, still have it mapped; it is zero
  // afterwards. For memory that no process will look at again.
  void discard();

  // Identifies a file: inode numbers are unique within a file system only.
  using Identity = std::pair<dev_t, ino_t>;

 private:
  Segment(std::byte* data, std::size_t size_bytes, int descriptor, Identity identity)
      : data_(data), size_bytes_(size_bytes), descriptor_(descriptor), identity_(identity) {}

  static std::shared_ptr<Segment> adopt(int descriptor, bool keep_open);
  void close_if_unwanted_locked();

  std::byte* data_;
  std::size_t size_bytes_;
  mutable std::mutex mutex_;
  int descriptor_;
  int num_pins_ = 0;
  bool wanted_ = true;  // the descriptor
  Identity identity_;
};

// Throws SystemFailure unless `segment`, which rank `peer` shares, has `size_bytes` from `offset_bytes` on: what a peer
// writes about its memory may be damaged, and must not lead out of it.
void require_bytes(const Segment& segment, std::size_t offset_bytes, std::size_t size_bytes, int peer);

// What require_bytes() throws, for the other things that a peer writes. `what` says who, what was found and expected.
SystemFailure damaged_memory(const std::string& what);

// The value of a field in a peer's memory, read once: a peer whose memory is damaged may change it between a check and
// a use, so both have to look at a copy.
template <class T>
T read_once(const T& field) {
  return static_cast<const volatile T&>(field);
}

}  // namespace accelerate_cpp::comm
