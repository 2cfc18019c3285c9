#include "core/comm/shm/memory_limit.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <thread>

#include "core/base/deadline.h"
#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

// The names of the files in the two versions of control groups.
struct Files {
  const char* limit;
  const char* used;
  const char* reclaimable;  // line of memory.stat, for the group with all below it
};
constexpr Files kVersion2{"/memory.max", "/memory.current", "inactive_file"};
constexpr Files kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"};

// A file that holds one number; nothing for a missing file or the word "max".
std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The part of the used memory that the kernel reclaims before it kills a process: clean file pages.
std::size_t reclaimable(const std::string& folder, const std::string& line) {
  std::ifstream file(folder + "/memory.stat");
  std::string key;
  for (std::size_t bytes = 0; file >> key >> bytes;) {
    if (key == line) {
      return bytes;
    }
  }
  return 0;
}

// Bytes left in one group; nothing if it has no limit.
std::optional<std::size_t> left_in(const std::string& folder, const Files& files) {
  const std::optional<std::size_t> limit = read_number(folder + files.limit);
  const std::optional<std::size_t> used = read_number(folder + files.used);
  if (!limit || !used) {
    return std::nullopt;
  }
  const std::size_t held = *used - std::min(*used, reclaimable(folder, files.reclaimable));
  return *limit - std::min(*limit, held);
}

std::optional<std::size_t> smaller(std::optional<std::size_t> one, std::optional<std::size_t> other) {
  return one && other ? std::min(*one, *other) : one ? one : other;
}

}  // namespace

std::optional<std::size_t> memory_left_in(const ControlGroup& group) {
  std::optional<std::size_t> least;
  for (const std::string& place : with_ancestors(group)) {
    least = smaller(least, smaller(left_in(place, kVersion2), left_in(place, kVersion1)));
  }
  return least;
}

std::optional<std::size_t> memory_available(const std::string& meminfo) {
  std::ifstream file(meminfo);
  std::string key;
  std::string unit;
  for (std::size_t kibibytes = 0; file >> key >> kibibytes && std::getline(file, unit);) {
    if (key == "MemAvailable:") {
      return kibibytes * 1024;
    }
  }
  return std::nullopt;
}

std::optional<std::size_t> memory_left(const std::string& proc, const std::string& mounts) {
  std::optional<std::size_t> least = memory_available(proc + "/meminfo");
  for (const ControlGroup& group : control_groups(proc + "/self/cgroup", mounts, "memory")) {
    least = smaller(least, memory_left_in(group));
  }
  return least;
}

AllocationLock::AllocationLock(const char* file, std::chrono::milliseconds patience)
    : descriptor_(::open(file, O_RDONLY | O_CLOEXEC)) {
  const Deadline deadline = Deadline::after(patience);
  while (descriptor_ >= 0 && !held_) {
    held_ = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
    if (!held_ && ((errno != EWOULDBLOCK && errno != EINTR) || deadline.expired())) {
      return;
    }
    if (!held_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

AllocationLock::~AllocationLock() {
  if (descriptor_ >= 0) {
    // Unlocked explicitly: a child forked meanwhile shares the lock, and closing would not release it.
    ::flock(descriptor_, LOCK_UN);
    ::close(descriptor_);
  }
}

void check_memory_limit(std::size_t size_bytes) {
  const auto check = [size_bytes](const std::optional<std::size_t>& left, const std::string& whose) {
    if (left && *left < size_bytes) {
      throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of shared memory: " + whose + " has " +
                              std::to_string(*left) + " bytes left; free some, raise the limit or use fewer processes",
                          ENOMEM);
    }
  };
  for (const ControlGroup& group : control_groups("/proc/self/cgroup", "/sys/fs/cgroup", "memory")) {
    check(memory_left_in(group), "the control group " + group.folder);
  }
  check(memory_available("/proc/meminfo"), "the machine");
}

}  // namespace accelerate_cpp::comm
