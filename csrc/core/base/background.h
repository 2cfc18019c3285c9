// Background threads, and what happens to them when the process forks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp {

// Whether a thread may need something that is torn down before the process ends, such as an interpreter.
enum class AtExit { kLeft, kAwaited };

// Runs `body`, which may not throw, in a detached thread that takes no signals and shows `name` (at most 15 characters)
// in debuggers. Throws SystemFailure when the system refuses another thread.
void start_background_thread(const char* name, std::function<void()> body, AtExit at_exit = AtExit::kLeft);

// Returns when all threads with AtExit::kAwaited have ended.
void await_background_threads();

// Changes in every forked child.
std::uint64_t fork_generation();

// The process in which an object was made. A forked child has the object's memory, but not its threads, and a mutex
// that one of them held is never released there.
class OwnerProcess {
 public:
  // Whether this process is a child that was forked later.
  bool forked() const { return fork_generation() != generation_; }

 private:
  std::uint64_t generation_ = fork_generation();
};

// The error of `operation` in a forked child, on a communicator that belongs to its parent, `owner` ("rank 1").
InvalidArgument communicator_of_parent(const std::string& operation, const std::string& owner);

}  // namespace accelerate_cpp
