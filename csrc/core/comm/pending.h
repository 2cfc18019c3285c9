// An operation under way that ends once, successfully or with an exception. Thread-safe.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "core/base/deadline.h"

namespace accelerate_cpp::comm {

class Pending {
 public:
  // May not throw.
  using Callback = std::function<void()>;

  Pending() = default;
  virtual ~Pending() = default;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  // Whether it has ended; may make progress on it. Never blocks for long or throws.
  virtual bool poll() noexcept { return ended(); }

  // Returns when it has ended; throws why it failed. When `deadline` passes first, a Timeout leaves it under way.
  virtual void wait(const std::optional<Deadline>& deadline) = 0;

  // Makes it end soon by itself: perhaps nobody will call wait().
  virtual void hurry() noexcept {}

  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }

  // Why it failed; null while it is under way or if it succeeded.
  std::exception_ptr error() const { return ended() ? error_ : nullptr; }

  // Calls `callback` once it has ended, in the thread that ends it and outside of any lock; at once if it has ended.
  void then(Callback callback) {
    {
      const std::lock_guard lock(mutex_);
      if (!ended()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

 protected:
  // Ends it. The caller runs the returned callbacks while it holds no lock.
  [[nodiscard]] std::vector<Callback> mark_ended(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    ended_.store(true, std::memory_order_release);
    return std::move(callbacks_);
  }

  void rethrow_error() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> ended_{false};
  std::exception_ptr error_;  // written once, before ended_
  std::vector<Callback> callbacks_;
};

}  // namespace accelerate_cpp::comm
