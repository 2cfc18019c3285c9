#include "core/comm/transfer_pump.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "core/base/service_threads.h"

namespace accelerate_cpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

// The longest time between two checks whether the thread should stop.
constexpr std::chrono::milliseconds kSlice{50};
// After its last transfer the thread looks for new ones this many times, once per grace period, before it sleeps until
// woken.
constexpr int kIdleLooks = 20;
// How often the thread checks whether somebody still waits.
constexpr std::chrono::milliseconds kWaiterPause{10};

void keep_for_good(std::shared_ptr<Pending> pending) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::shared_ptr<Pending>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(pending));
}

}  // namespace

class TransferPump::Posted final : public Pending {
 public:
  Posted(std::shared_ptr<State> state, std::shared_ptr<Transfer> transfer, std::function<void()> finish,
         Clock::time_point due)
      : state_(std::move(state)), transfer_(std::move(transfer)), finish_(std::move(finish)), due_(due) {}

  bool poll() noexcept override;
  void wait(const std::optional<Deadline>& deadline) override;
  void hurry() noexcept override;

 private:
  friend class TransferPump;
  friend struct State;

  // The transfer has ended: finishes it, once. `concluding` is held.
  void conclude(std::unique_lock<std::mutex> concluding);

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Transfer> transfer_;
  std::mutex concluding_;
  std::function<void()> finish_;
  Clock::time_point due_;  // when the thread begins to care; under the lock of the state
};

struct TransferPump::State : std::enable_shared_from_this<State> {
  explicit State(std::chrono::milliseconds grace_) : grace(grace_) {}

  void serve();
  std::function<void()> service() {
    return [self = shared_from_this()] { self->serve(); };
  }
  // Waits a little for one of the transfers, moving all of them on.
  static void move_on(const std::vector<std::shared_ptr<Posted>>& transfers);

  const std::chrono::milliseconds grace;
  std::mutex mutex;
  std::condition_variable changed;  // for the thread, and for who waits for its end
  std::vector<std::shared_ptr<Posted>> pending;
  int waiters = 0;  // threads that wait for a transfer, and so move all of them on
  bool looking = false;
  bool closing = false;
  ServiceThreads threads{"accelerate-p2p", AtExit::kAwaited};
};

// While a service thread runs callbacks.
class TransferPump::HeldUp {
 public:
  HeldUp(State& state, bool calls) : state_(calls && served == &state ? &state : nullptr) {
    if (state_ != nullptr) {
      served = nullptr;  // nested callbacks do not count again
      const std::lock_guard lock(state_->mutex);
      state_->threads.hold_up(!state_->pending.empty(), state_->service());
    }
  }
  ~HeldUp() {
    if (state_ != nullptr) {
      const std::lock_guard lock(state_->mutex);
      state_->threads.resume();
      served = state_;
    }
  }
  HeldUp(const HeldUp&) = delete;
  HeldUp& operator=(const HeldUp&) = delete;

  // What the calling thread serves; null in other threads, and while it is held up.
  static thread_local State* served;

 private:
  State* const state_;
};

thread_local TransferPump::State* TransferPump::HeldUp::served = nullptr;

// Tells the thread that somebody waits.
class TransferPump::Waiting {
 public:
  explicit Waiting(State& state) : state_(state) { count(1); }
  ~Waiting() { count(-1); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  void count(int change) {
    if (!state_.threads.forked()) {
      const std::lock_guard lock(state_.mutex);
      state_.waiters += change;
    }
  }

  State& state_;
};

bool TransferPump::Posted::poll() noexcept {
  if (!ended() && transfer_->poll()) {
    // The thread that is concluding may need something that this one holds (such as the interpreter lock), so do not
    // wait for it.
    if (std::unique_lock concluding(concluding_, std::try_to_lock); concluding.owns_lock()) {
      conclude(std::move(concluding));
    }
  }
  return ended();
}

void TransferPump::Posted::wait(const std::optional<Deadline>& deadline) {
  if (!ended()) {
    try {
      const Waiting waiting(*state_);
      transfer_->wait(deadline.value_or(Deadline::never()));
    } catch (...) {
      if (!transfer_->poll()) {
        throw;  // this wait alone is over: its deadline has passed, or it was interrupted
      }
    }
    conclude(std::unique_lock(concluding_));
  }
  rethrow_error();
}

void TransferPump::Posted::hurry() noexcept {
  if (ended() || state_->threads.forked()) {
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    due_ = Clock::time_point::min();
  }
  state_->changed.notify_all();
}

void TransferPump::Posted::conclude(std::unique_lock<std::mutex> concluding) {
  if (ended()) {
    return;
  }
  std::exception_ptr error;
  try {
    transfer_->wait(Deadline::never());
    finish_();
  } catch (...) {
    error = std::current_exception();
  }
  const std::function<void()> released = std::move(finish_);
  finish_ = nullptr;
  const std::vector<Callback> callbacks = mark_ended(error);
  concluding.unlock();
  const HeldUp held_up(*state_, !callbacks.empty());
  for (const Callback& callback : callbacks) {
    callback();
  }
}

void TransferPump::State::move_on(const std::vector<std::shared_ptr<Posted>>& transfers) {
  const auto under_way = [](const std::shared_ptr<Posted>& posted) { return !posted->poll(); };
  const auto first = std::find_if(transfers.begin(), transfers.end(), under_way);
  if (first == transfers.end()) {
    return;
  }
  try {
    (*first)->transfer_->wait(Deadline::after(kSlice));
  } catch (...) {
    // Either the slice is over or the transfer has failed, which poll() will find.
  }
  std::for_each(first, transfers.end(), under_way);
}

void TransferPump::State::serve() {
  std::unique_lock lock(mutex);
  HeldUp::served = this;
  int idle_looks = 0;
  while (!closing && !threads.surplus()) {
    const bool idle = pending.empty();
    idle_looks = idle ? idle_looks + 1 : 0;
    const Clock::time_point now = Clock::now();
    const auto due = [&](const std::shared_ptr<Posted>& posted) { return posted->due_ <= now; };
    if (idle && idle_looks > kIdleLooks) {
      changed.wait(lock);
      idle_looks = 0;
    } else if (waiters > 0 || std::none_of(pending.begin(), pending.end(), due)) {
      looking = true;
      changed.wait_for(lock, waiters > 0 ? kWaiterPause : std::clamp(grace, kGrace, kSlice));
      looking = false;
    } else {
      std::vector<std::shared_ptr<Posted>> transfers = pending;
      lock.unlock();
      move_on(transfers);
      transfers.clear();
      lock.lock();
    }
    std::erase_if(pending, [](const std::shared_ptr<Posted>& posted) { return posted->ended(); });
  }
  threads.end();
  changed.notify_all();
}

TransferPump::TransferPump(std::chrono::milliseconds grace) : state_(std::make_shared<State>(grace)) {}

TransferPump::~TransferPump() {
  if (state_->threads.forked()) {
    return;  // the mutex may be held by a thread that this process does not have
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    for (const std::shared_ptr<Posted>& posted : state_->pending) {
      if (!posted->ended()) {
        keep_for_good(posted);
      }
    }
    state_->pending.clear();
  }
  state_->changed.notify_all();
}

std::shared_ptr<Pending> TransferPump::post(std::shared_ptr<Transfer> transfer, std::function<void()> finish) {
  State& state = *state_;
  auto posted = std::make_shared<Posted>(state_, std::move(transfer), std::move(finish), Clock::now() + state.grace);
  if (posted->poll() || state.threads.forked()) {
    return posted;
  }
  bool wake = false;
  {
    const std::lock_guard lock(state.mutex);
    if (!state.closing && !state.threads.serving()) {
      state.threads.require(state.service());
    }
    state.pending.push_back(posted);
    wake = !state.looking;
  }
  if (wake) {
    state.changed.notify_all();
  }
  return posted;
}

void TransferPump::stop() {
  State& state = *state_;
  if (state.threads.forked()) {
    return;
  }
  std::unique_lock lock(state.mutex);
  state.closing = true;
  state.changed.notify_all();
  state.changed.wait(lock, [&] { return state.threads.ended(); });
}

}  // namespace accelerate_cpp::comm
