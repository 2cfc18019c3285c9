#include "core/comm/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/comm/shm/memory_limit.h"

namespace accelerate_cpp::comm {
namespace {

// The segments this process has mapped, by inode: how thread ranks come to share one mapping.
struct Mapped {
  std::mutex mutex;
  std::map<std::uint64_t, std::weak_ptr<Segment>> by_inode;
};

Mapped& mapped() {
  static Mapped* const instance = new Mapped;  // never destroyed: segments may outlive static destructors
  return *instance;
}

class DescriptorGuard {
 public:
  explicit DescriptorGuard(int descriptor) : descriptor_(descriptor) {}
  ~DescriptorGuard() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  DescriptorGuard(const DescriptorGuard&) = delete;
  DescriptorGuard& operator=(const DescriptorGuard&) = delete;
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::uint64_t inode_of(int descriptor, std::size_t* size_bytes) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) {
    throw SystemFailure("fstat of a shared memory segment", errno);
  }
  *size_bytes = static_cast<std::size_t>(status.st_size);
  return status.st_ino;
}

}  // namespace

std::shared_ptr<Segment> Segment::create(std::size_t size_bytes) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (size_bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - page) {
    throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of shared memory", EFBIG);
  }
  const std::size_t rounded = std::max((size_bytes + page - 1) / page, std::size_t{1}) * page;
  check_memory_limit(rounded);
  const int descriptor = ::memfd_create("accelerate_cpp", MFD_CLOEXEC);
  if (descriptor < 0) {
    throw SystemFailure("memfd_create for shared memory", errno);
  }
  DescriptorGuard guard(descriptor);
  int error = 0;
  do {
    error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(rounded));
  } while (error == EINTR);
  if (error != 0) {
    throw SystemFailure("allocating " + std::to_string(rounded) + " bytes of shared memory", error);
  }
  std::size_t actual = 0;
  const std::uint64_t inode = inode_of(descriptor, &actual);
  std::shared_ptr<Segment> segment = adopt(descriptor, actual, inode, true);
  guard.release();
  return segment;
}

std::shared_ptr<Segment> Segment::map(int descriptor) {
  const DescriptorGuard guard(descriptor);
  std::size_t size_bytes = 0;
  const std::uint64_t inode = inode_of(descriptor, &size_bytes);
  return adopt(descriptor, size_bytes, inode, false);
}

std::shared_ptr<Segment> Segment::adopt(int descriptor, std::size_t size_bytes, std::uint64_t inode, bool keep_open) {
  const std::lock_guard lock(mapped().mutex);
  std::weak_ptr<Segment>& known = mapped().by_inode[inode];
  if (std::shared_ptr<Segment> segment = known.lock()) {
    return segment;
  }
  void* const address = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (address == MAP_FAILED) {
    throw SystemFailure("mapping " + std::to_string(size_bytes) + " bytes of shared memory", errno);
  }
  std::shared_ptr<Segment> segment(
      new Segment(static_cast<std::byte*>(address), size_bytes, keep_open ? descriptor : -1, inode));
  known = segment;
  return segment;
}

void Segment::close_descriptor() {
  if (descriptor_ >= 0) {
    ::close(std::exchange(descriptor_, -1));
  }
}

Segment::~Segment() {
  {
    const std::lock_guard lock(mapped().mutex);
    const auto found = mapped().by_inode.find(inode_);
    if (found != mapped().by_inode.end() && found->second.expired()) {
      mapped().by_inode.erase(found);
    }
  }
  ::munmap(data_, size_bytes_);
  close_descriptor();
}

}  // namespace accelerate_cpp::comm
