// Operations in the order in which they were issued, one at a time.
//
// A thread that waits for a task runs it, after the tasks issued before it ("a waiter helps"): this needs no hand-over,
// and no second thread competes for the core. Only a task that nobody has begun within a grace period is run by a
// thread of the queue, which starts with the first issued task. A callback in this thread may wait for other tasks;
// another thread then runs them.
//
// Thread-safe. In a forked child the thread does not exist, so that there the queue refuses to work.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "core/base/background.h"
#include "core/comm/options.h"
#include "core/comm/pending.h"

namespace accelerate_cpp::comm {

class WorkQueue {
 public:
  using Body = std::function<void()>;

  // How long a task waits for a helper. With cores to spare, 0 lets the thread begin at once.
  static constexpr std::chrono::milliseconds kGrace{1};

  // `probe` is called every 50 ms within waits. With AtExit::kLeft, what tasks hold and their callbacks may not need
  // the interpreter, and a program ends although the queue, which somebody still has, waits for tasks.
  explicit WorkQueue(
      InterruptProbe probe = [] {}, std::chrono::milliseconds grace = kGrace, AtExit at_exit = AtExit::kAwaited);

  // Does not wait for anything: tasks that are left are run by the thread, which then ends.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Appends a task. What `body` throws becomes the error of the task; what it holds is released before the task ends.
  std::shared_ptr<Pending> issue(Body body);

  // Whether every task has ended. Once the queue is stopped it is not idle any more.
  bool idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

  // Returns when every task issued before has ended, successfully or not; helps like a waiter. If a task that it helps
  // with raises anything but an Error of this library (mainly an interrupt), this throws it as well.
  void drain() {
    if (!idle()) {
      drain_tasks();
    }
  }

  // Lets the running task end, fails those that wait with `reason`, and ends the thread; from then on issue() and
  // drain() throw `reason`. The caller must first have ended whatever the running task waits for.
  void stop(const std::exception_ptr& reason);

 private:
  class Task;
  struct State;

  void drain_tasks();

  // Shared with the thread and with every task, which may outlive the queue.
  const std::shared_ptr<State> state_;
  const std::atomic<std::uint64_t>& unfinished_;
};

}  // namespace accelerate_cpp::comm
