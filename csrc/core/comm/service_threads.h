// The threads that serve a queue: one that is free to, and as many more as are held up in callbacks, which may wait for
// what is still in the queue. They are awaited at exit: callbacks, and what a task holds, may need the interpreter.
// Guarded by the mutex of the queue.
#pragma once

#include <functional>

#include "core/base/background.h"
#include "core/base/error.h"

namespace accelerate_cpp::comm {

class ServiceThreads {
 public:
  // Whether a thread serves that is not held up.
  bool serving() const { return threads_ > held_up_; }

  // Whether another thread than the one that asks, which is not held up, serves: then it may end.
  bool surplus() const { return threads_ - held_up_ > 1; }

  // Starts a thread unless one serves; `body` calls begin() first and end() last. Throws SystemFailure when the system
  // refuses.
  void require(const char* name, std::function<void()> body) {
    if (!serving()) {
      start_background_thread(name, std::move(body), AtExit::kAwaited);
      ++threads_;
    }
  }

  // The calling thread is about to run callbacks. When something is `left` to serve, another thread is started for it;
  // where the system refuses, that has to wait for the callbacks to return, or for somebody who helps.
  void hold_up(bool left, const char* name, std::function<void()> body) noexcept {
    ++held_up_;
    if (left) {
      try {
        require(name, std::move(body));
      } catch (const SystemFailure&) {  // see above
      }
    }
  }
  void resume() { --held_up_; }

  // In a thread that was started: first and last.
  void begin() { own_ = this; }
  void end() { --threads_; }

  // Whether all have ended, those that were held up, too; but for the calling thread, if it is one of them.
  bool ended() const { return threads_ == (own_ == this ? 1 : 0); }

 private:
  static inline thread_local const ServiceThreads* own_ = nullptr;
  int threads_ = 0;
  int held_up_ = 0;
};

}  // namespace accelerate_cpp::comm
