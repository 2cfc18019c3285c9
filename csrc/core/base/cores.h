// The processor cores that processes may use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace accelerate_cpp {

// A set of cores, by their numbers. Those from kCores on are left out.
class CoreSet {
 public:
  static constexpr std::size_t kWords = 64;
  static constexpr std::size_t kCores = 64 * kWords;
  using Words = std::array<std::uint64_t, kWords>;

  CoreSet() = default;
  explicit CoreSet(const Words& words) : words_(words) {}

  // Those that the calling thread may run on; empty where the system does not tell.
  static CoreSet of_thread();

  CoreSet& operator|=(const CoreSet& other);
  int count() const;
  const Words& words() const { return words_; }

 private:
  Words words_{};
};

// How long the processes of a control group may compute: so many cores' worth at a time.
struct CpuQuota {
  double cores = 0.0;       // 0: as long as they like
  std::uint64_t group = 0;  // equal for processes that share this quota
};

// The tightest quota of the control groups of this process and their ancestors (cpu.max of version 2, cpu.cfs_quota_us
// of version 1), from a folder like /proc and the mounts of control groups (/sys/fs/cgroup).
CpuQuota cpu_quota(const std::string& proc = "/proc", const std::string& mounts = "/sys/fs/cgroup");

// The cores that the calling thread may use, within its quota; at least a bit of one.
double usable_cores();

}  // namespace accelerate_cpp
