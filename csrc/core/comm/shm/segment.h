// One piece of memory that several processes map: an anonymous file (memfd) without a name, so nothing is left behind
// however a process dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace accelerate_cpp::comm {

class Segment {
 public:
  // Zero-filled memory of at least `size_bytes`, really allocated: no later write to it can fail. Throws SystemFailure
  // when the machine or the control group has too little memory.
  static std::shared_ptr<Segment> create(std::size_t size_bytes);

  // Maps the file behind `descriptor`, which another rank created, and closes the descriptor. Ranks that are threads of
  // one process share one mapping, so that a race detector sees them touch the same addresses.
  static std::shared_ptr<Segment> map(int descriptor);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

  // The descriptor to send to peers; -1 once closed or for a segment that was mapped.
  int descriptor() const { return descriptor_; }

  // The descriptor is no longer needed: every peer has been sent it.
  void close_descriptor();

 private:
  Segment(std::byte* data, std::size_t size_bytes, int descriptor, std::uint64_t inode)
      : data_(data), size_bytes_(size_bytes), descriptor_(descriptor), inode_(inode) {}

  static std::shared_ptr<Segment> adopt(int descriptor, std::size_t size_bytes, std::uint64_t inode, bool keep_open);

  std::byte* data_;
  std::size_t size_bytes_;
  int descriptor_;
  std::uint64_t inode_;
};

}  // namespace accelerate_cpp::comm
