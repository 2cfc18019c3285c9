// How long each thread of this process has waited for other ranks, over all communicators: what a view of a run tells
// the rank by that the others wait for.
#pragma once

#include <chrono>

namespace accelerate_cpp::comm {

// Of the calling thread since it started. Threads beside it, which wait while it computes, count for themselves.
std::chrono::nanoseconds time_waited() noexcept;

// While one exists, its thread waits. One within another does not count twice.
class Waiting {
 public:
  Waiting() noexcept;
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const std::chrono::steady_clock::time_point began_;
};

}  // namespace accelerate_cpp::comm
