// How long each thread of this process has waited for other ranks, over all communicators: with this, a view of a run
// finds the rank that the others wait for.
#pragma once

#include <chrono>

namespace accelerate_cpp::comm {

// The time of the calling thread since it started. Other threads are counted separately.
std::chrono::nanoseconds time_waited() noexcept;

// Counts the time while it exists as waiting. Nested ones do not count twice.
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
