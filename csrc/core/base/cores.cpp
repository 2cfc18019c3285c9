#include "core/base/cores.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <bit>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "core/base/control_groups.h"

namespace accelerate_cpp {
namespace {

// The quota of one group; nothing if it has no limit.
std::optional<double> quota_in(const std::string& folder) {
  double quota = 0.0;
  double period = 0.0;
  if (std::ifstream both(folder + "/cpu.max"); both >> quota >> period && period > 0.0) {
    return quota / period;  // "max" is no number
  }
  std::ifstream old_quota(folder + "/cpu.cfs_quota_us");
  std::ifstream old_period(folder + "/cpu.cfs_period_us");
  if (old_quota >> quota && old_period >> period && quota > 0.0 && period > 0.0) {
    return quota / period;
  }
  return std::nullopt;
}

}  // namespace

CoreSet CoreSet::of_thread() {
  CoreSet cores;
#if defined(__linux__)
  // The bits are in machine words. The kernel refuses a set that is smaller than its own.
  std::vector<unsigned long> bits(16384 / (8 * sizeof(unsigned long)));
  if (::sched_getaffinity(0, bits.size() * sizeof(unsigned long), reinterpret_cast<cpu_set_t*>(bits.data())) == 0) {
    for (std::size_t core = 0; core < kCores; ++core) {
      const std::size_t width = 8 * sizeof(unsigned long);
      cores.words_[core / 64] |= static_cast<std::uint64_t>((bits[core / width] >> (core % width)) & 1) << (core % 64);
    }
  }
#endif
  return cores;
}

CoreSet& CoreSet::operator|=(const CoreSet& other) {
  std::transform(words_.begin(), words_.end(), other.words_.begin(), words_.begin(), std::bit_or<std::uint64_t>());
  return *this;
}

int CoreSet::count() const {
  int total = 0;
  for (const std::uint64_t word : words_) {
    total += std::popcount(word);
  }
  return total;
}

CpuQuota cpu_quota(const std::string& proc, const std::string& mounts) {
  CpuQuota tightest;
  for (const ControlGroup& group : control_groups(proc + "/self/cgroup", mounts, "cpu")) {
    for (const std::string& folder : with_ancestors(group)) {
      const std::optional<double> quota = quota_in(folder);
      if (quota && (tightest.cores == 0.0 || *quota < tightest.cores)) {
        tightest = {*quota, std::hash<std::string>()(folder)};
      }
    }
  }
  return tightest;
}

double usable_cores() {
  const int allowed = CoreSet::of_thread().count();
  const double cores = allowed > 0 ? allowed : std::max(1u, std::thread::hardware_concurrency());
  const CpuQuota quota = cpu_quota();
  return quota.cores > 0.0 ? std::min(cores, quota.cores) : cores;
}

}  // namespace accelerate_cpp
