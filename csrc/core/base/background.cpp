#include "core/base/background.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

std::atomic<std::uint64_t> generation{0};

void enter_next_generation() {
  generation.fetch_add(1, std::memory_order_relaxed);
}

// Signals are for the threads of the user's program: a new thread inherits the mask of its creator.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

void set_name(const char* name) {
#if defined(__APPLE__)
  ::pthread_setname_np(name);
#else
  ::pthread_setname_np(::pthread_self(), name);
#endif
}

}  // namespace

void start_background_thread(const char* name, std::function<void()> body) {
  const SignalsBlocked blocked;
  try {
    std::thread([name = std::string(name), body = std::move(body)] {
      set_name(name.c_str());
      body();
    }).detach();
  } catch (const std::system_error& error) {
    throw SystemFailure("starting the thread '" + std::string(name) + "'", error.code().value());
  }
}

std::uint64_t fork_generation() {
  static const int installed = ::pthread_atfork(nullptr, nullptr, enter_next_generation);
  (void)installed;
  return generation.load(std::memory_order_relaxed);
}

InvalidArgument communicator_of_parent(const std::string& operation, const std::string& owner) {
  return InvalidArgument(operation + ": this process was forked from " + owner +
                         ", and its communicator did not come along; create a new group in the child");
}

}  // namespace accelerate_cpp
