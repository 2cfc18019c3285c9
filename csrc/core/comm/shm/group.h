// The ranks of one host that share memory: their control blocks, waiting for each other, and failing together.
//
// An operation has a sequence number. Each rank announces what it is about to do and reads what the others announced; a
// difference raises MismatchedCollective on all of them, and the group stays usable. It also stays usable when a rank
// withdraws from an operation, which raises PeerWithdrew on the others. Any other error while an operation runs is
// published: this rank's group is unusable from then on, and every peer that waits for it raises PeerLost. A long wait
// is reported once, and the error that ends one says where every rank is.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/base/deadline.h"
#include "core/base/error.h"
#include "core/comm/call.h"
#include "core/comm/options.h"
#include "core/comm/shm/arena.h"
#include "core/comm/shm/control_block.h"
#include "core/comm/shm/liveness.h"
#include "core/comm/store.h"
#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {

class Group {
 public:
  // Collective. `extra_bytes` of memory follow the control block of each rank. Throws Timeout when ranks are missing.
  Group(Store& store, int rank, int size, std::size_t extra_bytes, Deadline deadline, WaitHooks hooks);

  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const WaitHooks& hooks() const { return hooks_; }
  // Cores that the ranks of the group may use together: those that any of them may run on, within their quotas.
  double cores() const { return cores_; }
  // What a wait does before it sleeps.
  const SpinLimits& spin_limits() const { return spin_limits_; }

  RankControl& own() { return *controls_[static_cast<std::size_t>(rank_)]; }
  RankControl& control(int rank) const { return *controls_[static_cast<std::size_t>(rank)]; }
  // The memory behind the control block of `rank`, aligned to a page.
  std::byte* extra(int rank) { return reinterpret_cast<std::byte*>(&control(rank)) + control_bytes_; }

  // Runs `body` as one operation: one at a time in this process, refused once the group has failed, with its failure
  // published.
  template <class Body>
  void run(const Operation& operation, const Call& call, const Body& body) {
    const std::lock_guard lock(mutex_);
    check_usable([this](const Operation& what) { return what.signature.describe(hooks_); }, operation);
    current_ = operation;
    current_.signature.shape = call.shape;
    location_ = call.location;
    stalled_since_.reset();
    warned_ = false;
    may_withdraw_ = false;
    const Running running(running_, own());
    number_ = next_sequence();
    try {
      catch_up(call.deadline);
      body();
    } catch (...) {
      end_in_error();
      throw;
    }
  }

  // Runs `body` unless an operation is running. Never blocks.
  template <class Body>
  void try_between_operations(const Body& body) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) {
      body();
    }
  }

  // Takes part in the next operation by making it end in PeerWithdrew on every other rank.
  void withdraw(const std::string& reason, const Call& call);

  // Within run(), after announce(): whether an error from outside this library (mainly an interrupt) makes this rank
  // withdraw from the operation instead of failing the group. Only while no rank can have completed the operation.
  void set_may_withdraw(bool may) { may_withdraw_ = may; }

  // How many operations have ended in an error on all ranks alike.
  std::uint64_t interruptions() const noexcept { return control(rank_).interruptions.load(std::memory_order_acquire); }

  // Waits until all ranks have counted as many.
  void await_interruptions(const Deadline& deadline);

  // The sequence number that the next announce() will use.
  std::uint64_t next_sequence() const { return sequence_ + 1; }

  // Notes in the operation where its operand lies, if that is in an arena and large enough to be used there.
  void place_in_arena(Operation& operation, const void* data, std::size_t size_bytes) const;

  // Within run(), before announce(): elements that this rank gives to and expects from every rank, for an operation
  // with has_counts.
  void set_counts(const std::vector<std::uint64_t>& given, const std::vector<std::uint64_t>& expected);

  // Within run(): announces the current operation.
  void announce();

  // Waits until all ranks have announced theirs and compares them. Afterwards announced(r) is rank r's description.
  void await_announcements(const Deadline& deadline);
  const Operation& announced(int rank) const { return control(rank).operations[sequence_ & 1]; }
  // What `rank` gives to `to`, in elements.
  std::uint64_t given(int rank, int to) const { return read_once(counts(rank, sequence_)[to]); }
  std::uint64_t expected(int rank, int from) const { return counts(rank, sequence_)[size_ + from]; }

  // Bytes [begin_bytes, begin_bytes + size_bytes) of the operand that `peer` has announced to lie in its arena. Throws
  // SystemFailure when the segment that it names ends before.
  std::byte* operand(int peer, std::size_t begin_bytes, std::size_t size_bytes, const Deadline& deadline);

  // Waits until `condition`, which depends on what `peer` has published, holds.
  template <class Condition>
  void wait(int peer, const Deadline& deadline, const Condition& condition) {
    if (condition()) {
      return;
    }
    const Waiting waiting;
    auto last_check = std::chrono::steady_clock::now();
    control(peer).event.wait_until(condition, spin_limits_, [&] {
      const auto now = std::chrono::steady_clock::now();
      const bool look_closely = now - last_check >= std::chrono::milliseconds(40);
      if (look_closely) {
        last_check = now;
        own().awaited_in_collective.store(static_cast<std::uint32_t>(peer) + 1, std::memory_order_seq_cst);
        check_wait(peer, deadline);
      }
      check_withdrawals();
      const Loss lost = loss_during_wait(peer, look_closely);
      if (lost && !condition()) {
        throw_lost(peer, lost);
      }
    });
  }

  // For an operation that does not use announced segments: receives them anyway. Left in the sockets, they would keep
  // memory alive that its owner has freed.
  void take_in_segments();

  // The segment `id` of `peer`; waits until it has arrived.
  std::shared_ptr<Segment> peer_segment(int peer, std::uint32_t id, const Deadline& deadline);

  // Communicator::meet(). It is not an operation: it changes no sequence number, and only the loss of a rank fails the
  // group.
  std::vector<int> meet(const std::string& topic, const Call& call);

  // Publishes that this rank has left. Does nothing in a forked child.
  void leave() noexcept;
  bool someone_has_left();

  // Makes the current and later operations fail on every rank. Never blocks or throws; the first reason stays.
  void abort(const std::string& reason) noexcept;

  // Why a rank can no longer be waited for.
  struct Loss {
    std::string reason;  // empty while it can
    bool left = false;   // in good order

    explicit operator bool() const { return !reason.empty(); }
    // Throws PeerLost, or PeerLeft if the rank left in good order. The message starts with `wait`.
    [[noreturn]] void raise(const std::string& wait) const;
  };

  // Of `peer`. From any thread. Only with `look_closely` are its process and socket looked at, which takes system
  // calls.
  Loss loss_of(int peer, bool look_closely);

  // Where every rank is, one line each, each after a line break.
  std::string standings() const;

  // Whether this is a child of the process that the group belongs to.
  bool forked() const { return process_.forked(); }

  // Throws unless this process may use the group. The message starts with text(what).
  template <class Text, class What>
  void check_usable(const Text& text, const What& what) const {
    if (!usable()) {
      throw_unusable(text(what));
    }
  }

 private:
  static constexpr std::size_t kCountsOffset = 4096;
  static_assert(sizeof(RankControl) <= kCountsOffset);

  // Says, for as long as it lives, that an operation is running.
  class Running {
   public:
    Running(std::atomic<bool>& flag, RankControl& own) : flag_(flag), own_(own) {
      flag_.store(true, std::memory_order_relaxed);
    }
    ~Running() {
      flag_.store(false, std::memory_order_relaxed);
      if (own_.awaited_in_collective.load(std::memory_order_relaxed) != RankControl::kNobody) {
        own_.awaited_in_collective.store(RankControl::kNobody, std::memory_order_seq_cst);
      }
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    std::atomic<bool>& flag_;
    RankControl& own_;
  };

  // As cores(), from what all ranks have published.
  double count_cores() const;
  // Publishes how the current operation has ended, by the exception in flight.
  void end_in_error() noexcept;
  void count_interruption() noexcept;
  // Before the first operation after an interruption: waits until all ranks have announced the one before.
  void catch_up(const Deadline& deadline);
  // Within an operation that has been announced: throws PeerWithdrew if a rank has withdrawn from it.
  void check_withdrawals();
  // Why a wait for `peer` cannot succeed: the peer, this rank, or another rank that this operation needs is lost. Empty
  // while it still can.
  Loss loss_during_wait(int peer, bool look_closely);
  enum class Whereabouts { kHere, kElsewhere, kUnknown };
  // A rank that was in a meeting, and its attendance number then.
  struct Met {
    int rank;
    std::uint64_t attendance;
  };
  // Whether `peer` is in `meeting`, in which this rank is. Only with `look_closely` are processes looked at.
  Whereabouts whereabouts(int peer, std::uint64_t meeting, bool look_closely);
  std::vector<int> find_those_in(const std::string& topic, const Call& call);
  Whereabouts await_whereabouts(int peer, std::uint64_t meeting, const Deadline& deadline);
  // As abort(), from operation number `sequence` on. Earlier operations stay complete for every rank.
  void fail(const std::string& reason, std::uint64_t sequence) noexcept;
  bool usable() const;
  [[noreturn]] void throw_unusable(const std::string& what) const;
  bool counts_fit() const;
  std::uint64_t* counts(int rank, std::uint64_t sequence) const;
  // Interrupts, the deadline, and the report of a long wait.
  void check_wait(int peer, const Deadline& deadline);
  // Where the user's program called the current operation.
  std::string own_place() const;
  // Lets peers know.
  void publish_place();
  void await_places();
  [[noreturn]] void throw_mismatch();
  // Raises `lost` for a wait for `peer`; peers see where this rank was when it gave up.
  [[noreturn]] void throw_lost(int peer, const Loss& lost);
  std::string describe_wait(int peer) const;
  std::string describe_counts(int rank) const;
  // "rank 1 last reached operation #6 (barrier) at train.py:80".
  std::string standing(int peer) const;

  const int rank_;
  const int size_;
  const OwnerProcess process_;
  const WaitHooks hooks_;
  const std::size_t control_bytes_;
  SpinLimits spin_limits_{};
  double cores_ = 0.0;
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<RankControl*> controls_;
  std::vector<ProcessWatch> watches_;
  std::mutex mutex_;
  std::uint64_t sequence_ = 0;
  std::atomic<bool> running_{false};
  // About the operation that is running or ran last. `number_` is its sequence number, known before it is announced.
  std::uint64_t number_ = 0;
  Operation current_{{CallKind::kBarrier}};
  std::string_view location_;
  std::optional<std::chrono::steady_clock::time_point> stalled_since_;
  bool warned_ = false;
  bool may_withdraw_ = false;
  std::vector<Met> met_;  // in the last meeting
  bool behind_ = false;   // an operation ended before all ranks had announced it
};

}  // namespace accelerate_cpp::comm
