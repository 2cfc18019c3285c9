// The threads that serve a queue: one that is free, and one more for each that is held up in callbacks, which may wait
// for what is still in the queue. All members but forked() need the mutex of the queue. The queue outlives its threads,
// as a rule because each holds a reference to it.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/base/background.h"
#include "core/base/error.h"

namespace accelerate_cpp {

class ServiceThreads {
 public:
  // AtExit::kAwaited where callbacks, or what a task holds, may need the interpreter.
  ServiceThreads(const char* name, AtExit at_exit) : name_(name), at_exit_(at_exit) {}

  // In a forked child there are no threads, and the mutex of the queue may be held for good.
  bool forked() const { return process_.forked(); }

  // Whether a thread is there that is not held up.
  bool serving() const { return threads_ > held_up_; }

  // Whether another thread than the calling one, which is not held up, is free: then the calling one may end.
  bool surplus() const { return threads_ - held_up_ > 1; }

  // Starts a thread unless one is free; `body` calls end() last. Throws SystemFailure when the system refuses.
  void require(std::function<void()> body) {
    if (!serving()) {
      start_background_thread(
          name_,
          [this, body = std::move(body)] {
            own_ = this;
            body();
          },
          at_exit_);
      ++threads_;
    }
  }

  // The calling thread is about to run callbacks. When something is `left` to serve, another thread is started for it;
  // where the system refuses, the rest waits until the callbacks return or another thread helps.
  void hold_up(bool left, std::function<void()> body) noexcept {
    ++held_up_;
    if (left) {
      try {
        require(std::move(body));
      } catch (const SystemFailure&) {  // see above
      }
    }
  }
  void resume() { --held_up_; }

  // A thread that was started is about to end.
  void end() { --threads_; }

  // Whether all have ended, except for the calling thread, if it is one of them.
  bool ended() const { return threads_ == (own_ == this ? 1 : 0); }

 private:
  static inline thread_local const ServiceThreads* own_ = nullptr;
  const char* const name_;
  const AtExit at_exit_;
  const OwnerProcess process_;
  int threads_ = 0;
  int held_up_ = 0;
};

}  // namespace accelerate_cpp
