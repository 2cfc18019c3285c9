// The ranks of one host that share memory: their control blocks, waiting for each other, and failing together.
//
// An operation has a sequence number. Each rank announces what it is about to do and reads what the others announced; a
// difference raises MismatchedCollective on all of them, and the group stays usable. Any other error while an operation
// runs is published: this rank's group is unusable from then on, and every peer that waits for it raises PeerLost.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/error.h"
#include "core/comm/options.h"
#include "core/comm/shm/arena.h"
#include "core/comm/shm/control_block.h"
#include "core/comm/shm/liveness.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class Group {
 public:
  // Collective. `extra_bytes` of memory follow the control block of each rank. Throws Timeout when ranks are missing.
  Group(Store& store, int rank, int size, std::size_t extra_bytes, Deadline deadline, InterruptProbe probe);

  // Publishes that this rank has left. Does nothing in a forked child.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }

  RankControl& own() { return *controls_[static_cast<std::size_t>(rank_)]; }
  RankControl& control(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  // The memory behind the control block of `rank`, aligned to a page.
  std::byte* extra(int rank) { return reinterpret_cast<std::byte*>(&control(rank)) + kControlBytes; }

  // Runs `body` as one operation: alone in this process, refused once the group has failed, its failure published.
  template <class Body>
  void run(const Operation& operation, const Body& body) {
    const std::lock_guard lock(mutex_);
    check_usable(operation);
    current_ = operation;
    const std::uint64_t next = next_sequence();
    try {
      body();
    } catch (const MismatchedCollective&) {
      throw;
    } catch (const std::exception& error) {
      fail(error.what(), next);
      throw;
    } catch (...) {
      fail("an exception during " + describe(operation), next);
      throw;
    }
  }

  // The sequence number that the next announce() will use.
  std::uint64_t next_sequence() const { return sequence_ + 1; }

  // Within run(): announces the current operation.
  void announce();

  // Waits until all ranks have announced theirs and compares them. Afterwards announced(r) is rank r's description.
  void await_announcements(const Deadline& deadline);
  const Operation& announced(int rank) { return control(rank).operations[sequence_ & 1]; }

  // Waits until `condition`, which depends on what `peer` has published, holds.
  template <class Condition>
  void wait(int peer, const Deadline& deadline, const Condition& condition) {
    if (condition()) {
      return;
    }
    auto last_check = std::chrono::steady_clock::now();
    control(peer).event.wait_until(condition, spins_, [&] {
      std::string lost = loss_of(peer);
      const auto now = std::chrono::steady_clock::now();
      if (lost.empty() && now - last_check >= std::chrono::milliseconds(40)) {
        last_check = now;
        check_wait(peer, deadline);
        lost = ended(peer) ? "rank " + std::to_string(peer) + " has ended" : "";
      }
      if (!lost.empty() && !condition()) {
        throw PeerLost(describe_wait(peer) + lost);
      }
    });
  }

  // The segment `id` of `peer`, waiting for its arrival if need be.
  std::shared_ptr<Segment> peer_segment(int peer, std::uint32_t id, const Deadline& deadline);

  // Makes the current and later operations fail on every rank. Never blocks or throws; the first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  static constexpr std::size_t kControlBytes = 4096;
  static_assert(sizeof(RankControl) <= kControlBytes);

  // As abort(), for operation number `sequence` and later ones: those that were complete before stay so for every rank.
  void fail(const std::string& reason, std::uint64_t sequence) noexcept;
  void check_usable(const Operation& operation) const;
  // Why `peer` can no longer be waited for, as far as it has said so itself; empty while it can.
  std::string loss_of(int peer);
  // Whether the process or the communicator of `peer` is gone.
  bool ended(int peer);
  std::string describe_wait(int peer) const;
  // Interrupts and the deadline.
  void check_wait(int peer, const Deadline& deadline);
  [[noreturn]] void throw_mismatch();

  const int rank_;
  const int size_;
  const pid_t owner_pid_;
  const InterruptProbe probe_;
  int spins_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<RankControl*> controls_;
  std::vector<ProcessWatch> watches_;
  std::mutex mutex_;
  Operation current_{OperationKind::kBarrier};
  std::uint64_t sequence_ = 0;
};

}  // namespace accelerate_cpp::comm
