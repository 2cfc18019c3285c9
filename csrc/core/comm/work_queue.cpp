#include "core/comm/work_queue.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/service_threads.h"

namespace accelerate_cpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kProbeInterval{50};
// After its last task the thread looks for new ones this many times, once per grace period, before it sleeps until
// woken.
constexpr int kLooksInGrace = 20;

// Whether `error` concerns the thread in which it was raised rather than the operation.
bool is_interrupt(const std::exception_ptr& error) {
  if (!error) {
    return false;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return false;
  } catch (...) {
    return true;
  }
}

}  // namespace

class WorkQueue::Task final : public Pending {
 public:
  Task(std::shared_ptr<State> state, Body body) : state_(std::move(state)), body_(std::move(body)) {}

  void wait(const std::optional<Deadline>& deadline) override;
  void hurry() noexcept override;

 private:
  friend class WorkQueue;
  friend struct State;

  const std::shared_ptr<State> state_;
  Body body_;
  std::uint64_t number_ = 0;  // from 1, in the order of issue
  Clock::time_point due_;     // when the thread may begin it
};

struct WorkQueue::State : std::enable_shared_from_this<State> {
  State(InterruptProbe probe_, std::chrono::milliseconds grace_, AtExit at_exit)
      : probe(std::move(probe_)), grace(grace_), threads("accelerate-work", at_exit) {}

  using Lock = std::unique_lock<std::mutex>;

  void check_process() const {
    if (threads.forked()) {
      throw InvalidArgument(
          "this process was forked off after the process group was created, which did not come along; create a new "
          "group in the child");
    }
  }

  // Runs the first waiting task and its callbacks. Returns the task's error; the lock is released.
  std::exception_ptr run_front(Lock& lock, bool by_service_thread);

  // Returns when `number` tasks have ended. Helps unless there is a deadline, which an operation that has begun would
  // miss.
  void await(std::uint64_t number, const std::optional<Deadline>& deadline);

  void hurry_until(std::uint64_t number);
  void serve();
  std::function<void()> service() {
    return [self = shared_from_this()] { self->serve(); };
  }

  const InterruptProbe probe;
  const std::chrono::milliseconds grace;
  std::atomic<std::uint64_t> unfinished{0};  // kept above 0 once the queue is stopped

  std::mutex mutex;
  std::condition_variable changed;  // a task or the thread has ended
  std::condition_variable work;     // for the thread that serves
  std::deque<std::shared_ptr<Task>> waiting;
  bool running = false;
  std::uint64_t issued = 0;
  std::uint64_t finished = 0;  // tasks end in order
  std::uint64_t hurried = 0;   // the thread may begin tasks up to this number at once
  bool looking = false;        // the thread sees new tasks without being woken
  ServiceThreads threads;
  bool closing = false;
  std::exception_ptr stop_reason;
};

std::exception_ptr WorkQueue::State::run_front(Lock& lock, bool by_service_thread) {
  const std::shared_ptr<Task> task = std::move(waiting.front());
  waiting.pop_front();
  running = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    task->body_();
  } catch (...) {
    error = std::current_exception();
  }
  task->body_ = nullptr;
  lock.lock();
  running = false;
  finished = task->number_;
  const std::vector<Pending::Callback> callbacks = task->mark_ended(error);
  unfinished.fetch_sub(1, std::memory_order_release);
  const bool more = !waiting.empty();
  const bool held_up = by_service_thread && !callbacks.empty();
  if (held_up) {
    threads.hold_up(more, service());
  }
  lock.unlock();
  changed.notify_all();
  if (more) {
    work.notify_one();
  }
  for (const Pending::Callback& callback : callbacks) {
    callback();
  }
  if (held_up) {
    lock.lock();
    threads.resume();
    lock.unlock();
  }
  return error;
}

void WorkQueue::State::await(std::uint64_t number, const std::optional<Deadline>& deadline) {
  check_process();
  Clock::time_point last_probe = Clock::now();
  if (deadline) {
    hurry_until(number);
  }
  Lock lock(mutex);
  while (finished < number) {
    if (!deadline && !running && !waiting.empty()) {
      const bool own = waiting.front()->number_ == number;
      const std::exception_ptr error = run_front(lock, false);
      if (!own && is_interrupt(error)) {
        std::rethrow_exception(error);
      }
      lock.lock();
      continue;
    }
    changed.wait_for(lock, deadline ? std::min(kProbeInterval, deadline->remaining()) : kProbeInterval);
    if (finished < number && Clock::now() - last_probe >= kProbeInterval) {
      lock.unlock();
      probe();
      last_probe = Clock::now();
      lock.lock();
    }
    if (finished < number && deadline && deadline->expired()) {
      throw Timeout("waited " + std::to_string(deadline->waited().count()) +
                    " ms for an asynchronous operation; it goes on, and can be waited for again");
    }
  }
}

void WorkQueue::State::hurry_until(std::uint64_t number) {
  {
    const Lock lock(mutex);
    hurried = std::max(hurried, number);
  }
  work.notify_one();
}

void WorkQueue::State::serve() {
  Lock lock(mutex);
  int idle_looks = 0;
  std::uint64_t seen = issued;
  while ((!closing || !waiting.empty()) && !threads.surplus()) {
    idle_looks = seen == issued ? idle_looks + 1 : 0;
    seen = issued;
    if (running || waiting.empty()) {
      looking = grace.count() > 0 && idle_looks < kLooksInGrace;
      if (looking) {
        work.wait_for(lock, grace);
      } else {
        work.wait(lock);
      }
      looking = false;
      continue;
    }
    const std::uint64_t number = waiting.front()->number_;
    const Clock::time_point due = waiting.front()->due_;
    if (!closing && number > hurried && Clock::now() < due) {
      looking = true;
      work.wait_until(lock, due);
      looking = false;
      continue;
    }
    run_front(lock, true);
    lock.lock();
  }
  threads.end();
  changed.notify_all();
}

void WorkQueue::Task::wait(const std::optional<Deadline>& deadline) {
  if (!ended()) {
    state_->await(number_, deadline);
  }
  rethrow_error();
}

void WorkQueue::Task::hurry() noexcept {
  if (!ended() && !state_->threads.forked()) {
    state_->hurry_until(number_);
  }
}

WorkQueue::WorkQueue(InterruptProbe probe, std::chrono::milliseconds grace, AtExit at_exit)
    : state_(std::make_shared<State>(std::move(probe), grace, at_exit)), unfinished_(state_->unfinished) {}

WorkQueue::~WorkQueue() {
  if (state_->threads.forked()) {
    return;  // the mutex may be held by a thread that this process does not have
  }
  {
    const State::Lock lock(state_->mutex);
    state_->closing = true;
  }
  state_->work.notify_one();
}

std::shared_ptr<Pending> WorkQueue::issue(Body body) {
  State& state = *state_;
  state.check_process();
  auto task = std::make_shared<Task>(state_, std::move(body));
  bool wake = false;
  {
    const State::Lock lock(state.mutex);
    if (state.stop_reason) {
      std::rethrow_exception(state.stop_reason);
    }
    if (!state.threads.serving()) {  // checked first because building the function object takes time
      state.threads.require(state.service());
    }
    task->number_ = ++state.issued;
    task->due_ = Clock::now() + state.grace;
    state.waiting.push_back(task);
    state.unfinished.fetch_add(1, std::memory_order_relaxed);
    wake = !state.looking;
  }
  if (wake) {
    state.work.notify_one();
  }
  return task;
}

void WorkQueue::drain_tasks() {
  State& state = *state_;
  state.check_process();
  std::uint64_t number = 0;
  {
    const State::Lock lock(state.mutex);
    if (state.stop_reason) {
      std::rethrow_exception(state.stop_reason);
    }
    number = state.issued;
  }
  state.await(number, std::nullopt);
}

void WorkQueue::stop(const std::exception_ptr& reason) {
  State& state = *state_;
  if (state.threads.forked()) {
    return;
  }
  // Destroyed and called without the lock, because both may wait for other threads.
  std::vector<Body> bodies;
  std::vector<Pending::Callback> callbacks;
  {
    State::Lock lock(state.mutex);
    if (state.stop_reason) {
      return;
    }
    state.stop_reason = reason;
    state.closing = true;
    state.unfinished.fetch_add(1, std::memory_order_relaxed);
    const std::deque<std::shared_ptr<Task>> failed = std::move(state.waiting);
    state.waiting.clear();
    state.work.notify_one();
    state.changed.wait(lock, [&] { return !state.running && !state.threads.serving(); });
    for (const std::shared_ptr<Task>& task : failed) {
      bodies.push_back(std::move(task->body_));
      std::vector<Pending::Callback> own = task->mark_ended(reason);
      std::move(own.begin(), own.end(), std::back_inserter(callbacks));
      state.unfinished.fetch_sub(1, std::memory_order_relaxed);
    }
    state.finished = state.issued;
  }
  state.changed.notify_all();
  for (const Pending::Callback& callback : callbacks) {
    callback();
  }
  // A callback that waited for one of these tasks returns now. Its thread may need the interpreter, which may end next.
  State::Lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.threads.ended(); });
}

}  // namespace accelerate_cpp::comm
