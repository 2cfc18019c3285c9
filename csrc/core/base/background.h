// Threads of our own, and what becomes of them when the process forks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp {

// Whether a thread may need what the program takes down before its process ends, such as an interpreter.
enum class AtExit { kLeft, kAwaited };

// Runs `body`, which may not throw, in a detached thread that takes no signals and shows `name` (at most 15 characters)
// in debuggers. Throws SystemFailure when the system refuses another thread.
void start_background_thread(const char* name, std::function<void()> body, AtExit at_exit = AtExit::kLeft);

// Returns when none of the threads with AtExit::kAwaited is left in this process.
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

// What a forked child throws from `operation` on a communicator that belongs to `owner`, e.g. "rank 1", its parent.
InvalidArgument communicator_of_parent(const std::string& operation, const std::string& owner);

}  // namespace accelerate_cpp
