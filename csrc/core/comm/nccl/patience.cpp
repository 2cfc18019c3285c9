#include "core/comm/nccl/patience.h"

#include <algorithm>
#include <thread>

namespace accelerate_cpp::comm {
namespace {

constexpr std::chrono::microseconds kNoSleepBefore{50};
constexpr std::chrono::microseconds kLongestSleep{1000};
constexpr std::chrono::milliseconds kProbeInterval{50};

}  // namespace

Patience::Patience(Deadline deadline, const WaitHooks& hooks)
    : deadline_(deadline), hooks_(hooks), start_(Clock::now()), next_probe_(start_ + kProbeInterval) {}

void Patience::pause() {
  const Clock::time_point now = Clock::now();
  if (now >= next_probe_) {
    hooks_.probe();
    next_probe_ = now + kProbeInterval;
  }
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - start_);
  if (waited < kNoSleepBefore) {
    std::this_thread::yield();
  } else {
    // An eighth of the wait so far: the answer is noticed late by at most that part of it.
    std::this_thread::sleep_for(std::min(waited / 8, kLongestSleep));
  }
}

std::chrono::milliseconds Patience::waited() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
}

bool Patience::warn_now() {
  if (warned_ || waited() < hooks_.warn_after) {
    return false;
  }
  warned_ = true;
  return true;
}

}  // namespace accelerate_cpp::comm
