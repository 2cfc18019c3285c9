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

  // The cores that the calling thread may run on; empty if the system does not say.
  static CoreSet of_thread();

  CoreSet& operator|=(const CoreSet& other);
  int count() const;
  const Words& words() const { return words_; }

 private:
  Words words_{};
};

// The CPU time that the processes of a control group may use, in cores.
struct CpuQuota {
  double cores = 0.0;       // 0: no limit
  std::uint64_t group = 0;  // equal for processes that share this quota
};

// The tightest quota of the control groups of this process and their ancestors (cpu.max of version 2, cpu.cfs_quota_us
// of version 1), from a folder like /proc and the mounts of control groups (/sys/fs/cgroup).
CpuQuota cpu_quota(const std::string& proc = "/proc", const std::string& mounts = "/sys/fs/cgroup");

// The number of cores that the calling thread may use, limited by its quota; always above 0.
double usable_cores();

}  // namespace accelerate_cpp
