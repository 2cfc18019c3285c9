#include "core/comm/shm/segment.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "core/base/error.h"
#include "core/base/open_files.h"
#include "core/comm/shm/memory_limit.h"

// Of Linux 6.3; older C libraries do not have it.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

namespace accelerate_cpp::comm {
namespace {

constexpr mode_t kOwnerOnly = 0600;

// A signal interrupts an allocation, and the kernel gives back what that call had allocated. In small steps it makes
// progress even under a stream of signals, as from a profiler.
constexpr std::size_t kAllocationStep = std::size_t{4} << 20;

// The segments that this process has mapped, so that ranks that are threads share one mapping.
struct Mapped {
  std::mutex mutex;
  std::map<Segment::Identity, std::weak_ptr<Segment>> by_identity;
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
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

int open_anonymous() {
  // A kernel may insist on a file that cannot be executed (vm.memfd_noexec=2), or not know of the flag.
  const int descriptor = ::memfd_create("accelerate_cpp", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  return descriptor >= 0 || errno != EINVAL ? descriptor : ::memfd_create("accelerate_cpp", MFD_CLOEXEC);
}

int open_unnamed(const char* folder) {
  return ::open(folder, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, kOwnerOnly);
}

int open_unlinked(const char* folder) {
  std::string path = std::string(folder) + "/accelerate_cpp-XXXXXX";
  DescriptorGuard file(::mkostemp(path.data(), O_CLOEXEC));
  return file.get() < 0 || ::unlink(path.c_str()) != 0 ? -1 : file.release();
}

// Whether files in `folder` stay in memory, instead of being written to a disk.
bool keeps_files_in_memory(const std::string& folder) {
  struct statfs status{};
  return ::statfs(folder.c_str(), &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == static_cast<decltype(status.f_type)>(RAMFS_MAGIC));
}

// An empty file, and where it lies: "" when it is in no folder.
struct File {
  int descriptor;
  std::string folder;
};

File open_file(const MemoryFiles& files) {
  const int anonymous = open_within_limit(files.anonymous);
  if (anonymous >= 0) {
    return {anonymous, ""};
  }
  int error = errno;
  if (lacks_descriptors(error)) {
    throw SystemFailure("memfd_create for shared memory: " + describe_open_files_limit(), error);
  }
  if (error == ENOMEM) {
    throw SystemFailure("memfd_create for shared memory", error);
  }
  std::string tried = "creating shared memory: memfd_create is refused (" + std::string(std::strerror(error)) + ")";
  for (const std::string& folder : files.folders) {
    if (!keeps_files_in_memory(folder)) {
      tried += ", " + folder + " is no tmpfs";
      continue;
    }
    int file = files.unnamed(folder.c_str());
    file = file >= 0 ? file : files.unlinked(folder.c_str());
    if (file >= 0) {
      return {file, folder};
    }
    error = errno;
    tried += ", " + folder + " takes no file (" + std::strerror(error) + ")";
  }
  throw SystemFailure(tried + "; allow memfd_create or mount a writable tmpfs at /dev/shm", error);
}

[[noreturn]] void throw_not_allocated(const File& file, std::size_t size_bytes, int error) {
  std::string what = "allocating " + std::to_string(size_bytes) + " bytes of shared memory";
  struct statvfs status{};
  // What was allocated so far is given back first, so that it counts as free.
  if (!file.folder.empty() && ::ftruncate(file.descriptor, 0) == 0 && ::fstatvfs(file.descriptor, &status) == 0) {
    what +=
        " in " + file.folder + " (memfd_create is refused), which has " +
        std::to_string(static_cast<std::size_t>(status.f_bavail) * status.f_frsize) +
        " bytes left; enlarge it (mount -o remount,size=..., in a container docker run --shm-size=...) or use fewer "
        "processes";
  }
  throw SystemFailure(what, error);
}

void allocate(const MemoryFiles& files, const File& file, std::size_t size_bytes) {
  for (std::size_t offset = 0; offset < size_bytes;) {
    const std::size_t step = std::min(kAllocationStep, size_bytes - offset);
    const int error = files.allocate(file.descriptor, static_cast<off_t>(offset), static_cast<off_t>(step));
    if (error == 0) {
      offset += step;
    } else if (error != EINTR) {
      throw_not_allocated(file, size_bytes, error);
    }
  }
}

}  // namespace

const MemoryFiles& MemoryFiles::of_system() {
  static const MemoryFiles* const files = new MemoryFiles{open_anonymous,    open_unnamed,       open_unlinked,
                                                          ::posix_fallocate, check_memory_limit, {"/dev/shm", "/tmp"}};
  return *files;
}

std::shared_ptr<Segment> Segment::create(std::size_t size_bytes, const MemoryFiles& files) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (size_bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - page) {
    throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of shared memory", EFBIG);
  }
  const std::size_t rounded = std::max((size_bytes + page - 1) / page, std::size_t{1}) * page;
  const File file = open_file(files);
  DescriptorGuard guard(file.descriptor);
  if (::fchmod(file.descriptor, kOwnerOnly) != 0) {
    throw SystemFailure("restricting shared memory to its owner", errno);
  }
  {
    const AllocationLock lock;
    files.check(rounded);
    allocate(files, file, rounded);
  }
  std::shared_ptr<Segment> segment = adopt(file.descriptor, true);
  guard.release();
  return segment;
}

std::shared_ptr<Segment> Segment::map(int descriptor) {
  const DescriptorGuard guard(descriptor);
  return adopt(descriptor, false);
}

std::shared_ptr<Segment> Segment::adopt(int descriptor, bool keep_open) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) {
    throw SystemFailure("fstat of a shared memory segment", errno);
  }
  const Identity identity(status.st_dev, status.st_ino);
  const auto size_bytes = static_cast<std::size_t>(status.st_size);
  const std::lock_guard lock(mapped().mutex);
  std::weak_ptr<Segment>& known = mapped().by_identity[identity];
  if (std::shared_ptr<Segment> segment = known.lock()) {
    return segment;
  }
  void* const address = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (address == MAP_FAILED) {
    throw SystemFailure("mapping " + std::to_string(size_bytes) + " bytes of shared memory", errno);
  }
  std::shared_ptr<Segment> segment(
      new Segment(static_cast<std::byte*>(address), size_bytes, keep_open ? descriptor : -1, identity));
  known = segment;
  return segment;
}

int Segment::descriptor() const {
  const std::lock_guard lock(mutex_);
  return descriptor_;
}

void Segment::close_if_unwanted_locked() {
  if (!wanted_ && num_pins_ == 0 && descriptor_ >= 0) {
    ::close(std::exchange(descriptor_, -1));
  }
}

void Segment::close_descriptor() {
  const std::lock_guard lock(mutex_);
  wanted_ = false;
  close_if_unwanted_locked();
}

bool Segment::pin_descriptor() {
  const std::lock_guard lock(mutex_);
  num_pins_ += descriptor_ >= 0 ? 1 : 0;
  return descriptor_ >= 0;
}

void Segment::unpin_descriptor() {
  const std::lock_guard lock(mutex_);
  --num_pins_;
  close_if_unwanted_locked();
}

void Segment::discard() {
  ::madvise(data_, size_bytes_, MADV_REMOVE);  // where it is refused, the memory stays until the last mapping goes
}

void require_bytes(const Segment& segment, std::size_t offset_bytes, std::size_t size_bytes, int peer) {
  const std::size_t size = segment.size_bytes();
  if (offset_bytes > size || size_bytes > size - offset_bytes) {
    throw damaged_memory("rank " + std::to_string(peer) + " shares " + std::to_string(size) +
                         " bytes of memory, expected " + std::to_string(size_bytes) + " bytes at " +
                         std::to_string(offset_bytes));
  }
}

SystemFailure damaged_memory(const std::string& what) {
  return {what + "; its memory is damaged, or it runs another version: see that all ranks run the same installation",
          EPROTO};
}

Segment::~Segment() {
  {
    const std::lock_guard lock(mapped().mutex);
    const auto found = mapped().by_identity.find(identity_);
    if (found != mapped().by_identity.end() && found->second.expired()) {
      mapped().by_identity.erase(found);
    }
  }
  ::munmap(data_, size_bytes_);
  close_descriptor();
}

}  // namespace accelerate_cpp::comm
