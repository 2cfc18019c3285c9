// The threads of this process as the system sees them.
#pragma once

#include <chrono>
#include <string>

#include <sys/types.h>

namespace accelerate_cpp {

// Whether the thread waits for something, or has ended. Always true where the system does not say (not Linux).
bool thread_sleeps(pid_t thread);

// Returns once every thread with this name (at most 15 characters) sleeps, or after `patience`. Returns whether they
// do; always true where the system does not say (not Linux).
bool await_sleep_of_threads(const std::string& name, std::chrono::milliseconds patience);

}  // namespace accelerate_cpp
