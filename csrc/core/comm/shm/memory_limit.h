// The memory that this process may still take: of its control groups, and of the machine. A process that exceeds either
// is killed without an error.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "core/base/control_groups.h"

namespace accelerate_cpp::comm {

// Bytes left under the tightest limit of the group and its ancestors; nothing when there is no limit. A container may
// see the names of its groups but not the groups themselves; then its root is its own group.
std::optional<std::size_t> memory_left_in(const ControlGroup& group);

// Bytes available without swapping, from a file like /proc/meminfo (line MemAvailable); nothing when it has no such
// line.
std::optional<std::size_t> memory_available(const std::string& meminfo);

// The least of all these for this process, from a folder like /proc and from `mounts` as above; nothing if none of them
// is known.
std::optional<std::size_t> memory_left(const std::string& proc, const std::string& mounts);

// Held by the one process of this host that has checked the limits and has not yet allocated: two that see the same
// room would both take it. The lock is one of the kernel's on a file that all processes see, so that it ends with its
// owner, however that ends; if it is not free within `patience`, its owner is stopped or some other program, and this
// process goes on without it.
class AllocationLock {
 public:
  static constexpr std::chrono::milliseconds kPatience{30000};

  explicit AllocationLock(const char* file = "/proc/meminfo", std::chrono::milliseconds patience = kPatience);
  ~AllocationLock();
  AllocationLock(const AllocationLock&) = delete;
  AllocationLock& operator=(const AllocationLock&) = delete;

  bool held() const { return held_; }

 private:
  const int descriptor_;
  bool held_ = false;
};

// Throws SystemFailure when `size_bytes` more do not fit into a control group of this process or into the machine.
void check_memory_limit(std::size_t size_bytes);

}  // namespace accelerate_cpp::comm
