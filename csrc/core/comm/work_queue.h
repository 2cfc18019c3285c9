// Operations in the order in which they were issued, one at a time.
//
// A task is run by the thread that waits for it, which first runs the tasks issued before it ("a waiter helps"): no
// hand-over, and no second thread that competes for the core. Only a task that nobody has begun within a grace period
// is run by a thread of the queue's own, which starts with the first task that is issued. A callback that is called in
// this thread may wait for other tasks: another thread then serves them.
//
// Thread-safe. In a forked child the thread does not exist, so that there the queue refuses to work.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "core/comm/options.h"
#include "core/comm/pending.h"

namespace accelerate_cpp::comm {

class WorkQueue {
 public:
  using Body = std::function<void()>;

  // How long a task waits for somebody to help it. Where cores are to spare, 0 lets the thread begin at once.
  static constexpr std::chrono::milliseconds kGrace{1};

  // `probe` is called every 50 ms within waits.
  explicit WorkQueue(InterruptProbe probe = [] {}, std::chrono::milliseconds grace = kGrace);

  // Does not wait for anything: tasks that are left are run by the thread, which then ends.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Appends a task. What `body` throws becomes the error of the task; what it holds is released before the task ends.
  std::shared_ptr<Pending> issue(Body body);

  // Whether every task has ended. Once the queue is stopped it is not idle any more.
  bool idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

  // Returns when every task issued before has ended, well or not, helping as a waiter does. When helping with a task
  // raises anything but an Error of ours (an interrupt, above all), that is thrown here, too.
  void drain() {
    if (!idle()) {
      drain_tasks();
    }
  }

  // Lets the running task end, fails those that wait with `reason`, and ends the thread; from then on issue() and
  // drain() throw `reason`. Whatever the running task waits for must have been made to give up.
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
