#include "torch_bridge/c10d_port.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/service_threads.h"

namespace accelerate_cpp::comm {
namespace {

using WorkPointer = C10dEngine::WorkPointer;

// How often the store is asked whether a rank has left.
constexpr std::chrono::milliseconds kAskInterval{300};

// Waits for works in the order in which it is given them, in a thread that the first one starts.
class Waiter {
 public:
  // Called in the thread once a work has ended, unless the Waiter has gone.
  using Done = std::function<void(const std::exception_ptr& error)>;

  explicit Waiter(std::shared_ptr<C10dEngine> engine) : state_(std::make_shared<State>(std::move(engine))) {}

  ~Waiter() {
    if (state_->threads.forked()) {
      return;
    }
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    state_->changed.notify_all();
    if (!state_->works.empty()) {
      try {
        state_->works.front().first->abort();
      } catch (const std::exception&) {  // engines that cannot abort are polled
      }
    }
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Whether all works have ended before `deadline`.
  bool flush(Deadline deadline) {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, deadline.remaining(), [this] { return state_->works.empty(); });
  }

  void add(WorkPointer work, Done done) {
    const std::lock_guard lock(state_->mutex);
    state_->works.emplace_back(std::move(work), std::move(done));
    state_->changed.notify_all();
    state_->threads.require([state = state_] { state->run(); });
  }

 private:
  struct State {
    explicit State(std::shared_ptr<C10dEngine> engine_) : engine(std::move(engine_)) {}

    void run() {
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [this] { return stopped || !works.empty(); });
        if (stopped) {
          return threads.end();
        }
        const WorkPointer work = works.front().first;
        lock.unlock();
        std::exception_ptr error;
        try {
          engine->wait_in_background(*work, [this] { return stopped.load(); });
        } catch (...) {
          error = std::current_exception();
        }
        lock.lock();
        const Done done = std::move(works.front().second);
        works.pop_front();
        changed.notify_all();
        if (!stopped) {
          lock.unlock();
          done(error);
          lock.lock();
        }
      }
    }

    const std::shared_ptr<C10dEngine> engine;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::pair<WorkPointer, Done>> works;  // the first one is being waited for
    std::atomic<bool> stopped{false};
    ServiceThreads threads{"accelerate-p2p", AtExit::kLeft};
  };

  const std::shared_ptr<State> state_;
};

// A message on its way into `target`: it arrives in memory of the engine; a thread that polls or waits copies it.
class Arrival final : public Transfer {
 public:
  // `number` counts the envelopes from `source`, from 1 on; none for data, which was sent together with its envelope.
  Arrival(std::shared_ptr<C10dEngine> engine, MemoryView target, int source, std::optional<std::uint64_t> number,
          Deadline deadline)
      : engine_(std::move(engine)),
        target_(target),
        source_(source),
        number_(number),
        deadline_(deadline),
        memory_(at::empty({static_cast<std::int64_t>(target.size_bytes())}, at::TensorOptions(at::kByte))) {}

  // Throws PeerLost if the engine refuses it, PeerLeft if it does so because the source has left.
  WorkPointer post(int tag) {
    try {
      return engine_->receive(memory_, source_, tag);
    } catch (const PeerLost&) {
      raise_if_left();
      throw;
    }
  }

  void end(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    if (!ended_) {
      error_ = error;
      ended_ = true;
    }
    changed_.notify_all();
  }

  bool poll() noexcept override {
    const std::lock_guard lock(mutex_);
    deliver();
    return ended_;
  }

  void wait(Deadline deadline) override {
    C10dEngine::Operation operation{name()};
    std::unique_lock lock(mutex_);
    while (!ended_) {
      const auto slice = std::min(deadline.remaining() + std::chrono::milliseconds(1), kSlice);
      if (changed_.wait_for(lock, slice, [this] { return ended_; })) {
        break;
      }
      lock.unlock();
      const std::exception_ptr found = look_around(operation);
      if (!found && deadline.expired()) {
        throw Timeout(operation.text + " has not completed after " + std::to_string(deadline.waited().count()) + " ms");
      }
      lock.lock();
      if (found && !ended_) {  // those that only poll learn of it, too
        error_ = found;
        ended_ = true;
      }
    }
    deliver();
    if (error_) {
      lock.unlock();
      raise();
    }
  }

  int source() const override { return source_; }

 private:
  static constexpr std::chrono::milliseconds kSlice{50};

  // What keeps this message from coming, if anything is known to. Throws what a hook throws.
  std::exception_ptr look_around(C10dEngine::Operation& operation) {
    try {
      engine_->look_around(deadline_, operation);
      const auto now = std::chrono::steady_clock::now();
      if (number_ && engine_->news().departure() && now - last_asked_ >= kAskInterval) {  // perhaps that of the source
        last_asked_ = now;
        raise_if_left();
      }
    } catch (const PeerLost&) {
      return std::current_exception();
    } catch (const Timeout&) {
      return std::current_exception();
    }
    return nullptr;
  }

  void raise_if_left() const {
    if (source_has_left()) {
      throw PeerLeft(name() + " on " + engine_->who() + ": " + engine_->hooks().name_of(source_) +
                     " has left the group without sending");
    }
  }

  // Whether this is an envelope, and the source has left the group without having sent it.
  bool source_has_left() const {
    const auto num_sent = number_ ? engine_->news().messages_of_departed(source_, engine_->rank()) : std::nullopt;
    return num_sent && *num_sent < *number_;
  }

  std::string name() const { return "receive from " + engine_->hooks().name_of(source_); }

  void deliver() {
    if (ended_ && !error_ && !delivered_ && target_.count > 0) {
      std::memcpy(target_.data, memory_.data_ptr(), target_.size_bytes());
    }
    delivered_ = ended_;
  }

  [[noreturn]] void raise() const {
    try {
      std::rethrow_exception(error_);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      raise_if_left();  // and closed its connection, which the engine takes for a loss
      const std::exception_ptr loss = engine_->translated(error, {name()});
      raise_if_left();  // the store may have been slow to tell
      std::rethrow_exception(loss);
    }
  }

  const std::shared_ptr<C10dEngine> engine_;
  const MemoryView target_;
  const int source_;
  const std::optional<std::uint64_t> number_;
  const Deadline deadline_;
  const at::Tensor memory_;
  std::chrono::steady_clock::time_point last_asked_{};  // by the one that waits for an envelope
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  bool delivered_ = false;
  std::exception_ptr error_;
};

class SentAtOnce final : public Transfer {
 public:
  bool poll() noexcept override { return true; }
  void wait(Deadline) override {}
  int source() const override { return -1; }
};

class WaitingPort final : public C10dPort {
 public:
  explicit WaitingPort(std::shared_ptr<C10dEngine> engine)
      : engine_(std::move(engine)),
        asked_before_send_(static_cast<std::size_t>(engine_->size())),
        num_sent_(static_cast<std::size_t>(engine_->size())),
        num_posted_(static_cast<std::size_t>(engine_->size())) {}

  bool flush(Deadline deadline) override { return waiter(kSent).flush(deadline); }

  std::vector<std::uint64_t> num_sent() const override {
    const std::lock_guard lock(mutex_);
    return num_sent_;
  }

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint32_t slot, const Call&) override {
    const std::string name = "send to " + engine_->hooks().name_of(destination);
    engine_->check_usable(name);
    if (has_left(destination)) {
      throw PeerLeft(name + " on " + engine_->who() + ": it has left the group");
    }
    const at::Tensor copy = at::empty({static_cast<std::int64_t>(data.size_bytes())}, at::TensorOptions(at::kByte));
    std::memcpy(copy.data_ptr(), data.data, data.size_bytes());
    const WorkPointer work = engine_->send(copy, destination, static_cast<int>(slot));
    if (slot == MessageMatcher::kEnvelopeSlot) {
      count(num_sent_, destination);
    }
    // Keeps the tensor alive until the message has left. If it cannot leave, this rank's next operation fails.
    waiter(kSent).add(work, [copy](const std::exception_ptr&) {});
    return std::make_shared<SentAtOnce>();
  }

  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint32_t slot, const Call& call) override {
    engine_->check_usable("receive from " + engine_->hooks().name_of(source));
    const bool is_envelope = slot == MessageMatcher::kEnvelopeSlot;
    const auto number = is_envelope ? std::optional(count(num_posted_, source)) : std::nullopt;
    const auto arrival = std::make_shared<Arrival>(engine_, data, source, number, call.deadline);
    const WorkPointer work = arrival->post(static_cast<int>(slot));
    waiter(is_envelope ? source : kFirstOfData - source).add(work, [arrival](const std::exception_ptr& error) {
      arrival->end(error);
    });
    return arrival;
  }

 private:
  // Keys of waiters. Envelopes have the number of their source: a rank that is slow holds up no message of others.
  static constexpr int kSent = -1;
  static constexpr int kFirstOfData = -2;

  // Whether `rank` has left, as far as the store is asked, now and then.
  bool has_left(int rank) {
    engine_->news().ask_now_and_then();
    if (!engine_->news().departure()) {
      return false;
    }
    {
      const std::lock_guard lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      auto& last_asked = asked_before_send_[static_cast<std::size_t>(rank)];
      if (now - last_asked < kAskInterval) {
        return false;
      }
      last_asked = now;
    }
    if (!engine_->news().messages_of_departed(rank, engine_->rank())) {
      return false;
    }
    const std::lock_guard lock(mutex_);
    asked_before_send_[static_cast<std::size_t>(rank)] = {};  // the next one learns of it, too
    return true;
  }

  Waiter& waiter(int key) {
    const std::lock_guard lock(mutex_);
    return waiters_.try_emplace(key, engine_).first->second;
  }

  // Returns the new number.
  std::uint64_t count(std::vector<std::uint64_t>& numbers, int rank) {
    const std::lock_guard lock(mutex_);
    return ++numbers[static_cast<std::size_t>(rank)];
  }

  const std::shared_ptr<C10dEngine> engine_;
  mutable std::mutex mutex_;
  std::map<int, Waiter> waiters_;
  std::vector<std::chrono::steady_clock::time_point> asked_before_send_;  // by rank
  // Envelopes, by rank.
  std::vector<std::uint64_t> num_sent_;
  std::vector<std::uint64_t> num_posted_;
};

}  // namespace

std::shared_ptr<C10dPort> C10dPort::make(std::shared_ptr<C10dEngine> engine) {
  return std::make_shared<WaitingPort>(std::move(engine));
}

}  // namespace accelerate_cpp::comm
