// A point in time after which waiting is an error. Durations that would overflow the clock mean "never".
#pragma once

#include <chrono>

namespace accelerate_cpp {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::milliseconds duration) {
    const Clock::time_point now = Clock::now();
    if (duration > std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now)) {
      return never();
    }
    return Deadline(now, now + duration);
  }

  static Deadline never() { return Deadline(Clock::now(), Clock::time_point::max()); }

  // A deadline of the same length, starting now.
  Deadline renewed() const {
    return end_ == Clock::time_point::max()
               ? never()
               : after(std::chrono::duration_cast<std::chrono::milliseconds>(end_ - start_));
  }

  bool expired() const { return Clock::now() >= end_; }

  // Time since the deadline was set.
  std::chrono::milliseconds waited() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
  }

  // Time left, at least zero.
  std::chrono::milliseconds remaining() const {
    const Clock::time_point now = Clock::now();
    return now >= end_ ? std::chrono::milliseconds(0)
                       : std::chrono::duration_cast<std::chrono::milliseconds>(end_ - now);
  }

 private:
  Deadline(Clock::time_point start, Clock::time_point end) : start_(start), end_(end) {}

  Clock::time_point start_;
  Clock::time_point end_;
};

}  // namespace accelerate_cpp
