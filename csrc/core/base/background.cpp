#include "core/base/background.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

std::atomic<std::uint64_t> generation{0};
std::atomic<int> num_awaited{0};  // running threads with AtExit::kAwaited

void enter_next_generation() {
  generation.fetch_add(1, std::memory_order_relaxed);
  num_awaited.store(0, std::memory_order_relaxed);
}

// Counts a thread from before it starts until it has released whatever it held.
class Awaited {
 public:
  Awaited() {
    fork_generation();  // installs the handler that resets the count in a forked child
    num_awaited.fetch_add(1);
  }
  ~Awaited() {
    num_awaited.fetch_sub(1);
    num_awaited.notify_all();
  }
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;
};

// Signals belong to the threads of the user's program. A new thread inherits its creator's signal mask.
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

void start_background_thread(const char* name, std::function<void()> body, AtExit at_exit) {
  const SignalsBlocked blocked;
  auto awaited = at_exit == AtExit::kAwaited ? std::make_unique<Awaited>() : nullptr;
  try {
    // Captures are destroyed in reverse order, so `body` goes before `awaited`.
    std::thread([awaited = std::move(awaited), name = std::string(name), body = std::move(body)] {
      set_name(name.c_str());
      body();
    }).detach();
  } catch (const std::system_error& error) {
    throw SystemFailure("starting the thread '" + std::string(name) + "'", error.code().value());
  }
}

void await_background_threads() {
  for (int left = num_awaited.load(); left > 0; left = num_awaited.load()) {
    num_awaited.wait(left);
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
