#include "core/comm/shm/group.h"

#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "core/base/check.h"
#include "core/comm/shm/mesh.h"

namespace accelerate_cpp::comm {
namespace {

// A look costs about 20 ns; being woken costs some 10 µs on bare metal and 50 µs or more on a virtual machine. So
// looking for 200 µs before sleeping costs at most a few wake-ups. With more ranks than cores the rank that is waited
// for may need this very core, so nobody looks: they sleep at once.
constexpr int kSpins = 10000;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

int checked_rank(int rank, int size) {
  if (rank < 0 || rank >= size) {
    throw InvalidArgument("rank " + std::to_string(rank) + " is not within a group of " + std::to_string(size));
  }
  return rank;
}

}  // namespace

Group::Group(Store& store, int rank, int size, std::size_t extra_bytes, Deadline deadline, InterruptProbe probe)
    : rank_(checked_rank(rank, size)),
      size_(size),
      owner_pid_(::getpid()),
      probe_(probe ? std::move(probe) : [] {}),
      spins_(usable_cores() >= size ? kSpins : 0),
      arena_(std::make_shared<Arena>(connect_mesh(store, rank, size, deadline, probe_))),
      segments_(static_cast<std::size_t>(size)),
      controls_(static_cast<std::size_t>(size)) {
  // Never released: a peer may map it after this rank has left, to read that it has.
  const Arena::Block block = arena_->create(kControlBytes + extra_bytes);
  ACCELERATE_CHECK(block.id == 0, "the control block is the first segment of its arena");
  segments_[static_cast<std::size_t>(rank)] = block.segment;
  // A segment is zero-filled, which is a fresh control block: peers may read it before this rank gets here.
  controls_[static_cast<std::size_t>(rank)] = reinterpret_cast<RankControl*>(block.segment->data());
  own().pid = owner_pid_;
  for (int peer = 0; peer < size; ++peer) {
    watches_.emplace_back(peer == rank ? 0 : arena_->peer_pid(peer));
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      segments_[static_cast<std::size_t>(peer)] = peer_segment(peer, 0, deadline);
      controls_[static_cast<std::size_t>(peer)] =
          reinterpret_cast<RankControl*>(segments_[static_cast<std::size_t>(peer)]->data());
    }
  }
}

Group::~Group() {
  if (::getpid() != owner_pid_) {
    return;
  }
  RankState expected = RankState::kRunning;
  own().state.compare_exchange_strong(expected, RankState::kLeft);
  own().event.notify();
}

void Group::check_usable(const Operation& operation) const {
  if (::getpid() != owner_pid_) {
    throw InvalidArgument(describe(operation) + ": this process was forked from rank " + std::to_string(rank_) +
                          ", and its communicator did not come along; create a new group in the child");
  }
  const RankControl& own = *controls_[static_cast<std::size_t>(rank_)];
  if (own.state.load(std::memory_order_acquire) == RankState::kFailed) {
    throw PeerLost(describe(operation) + " cannot run: the group has failed on rank " + std::to_string(rank_) + ": " +
                   own.failure);
  }
}

void Group::announce() {
  ++sequence_;
  own().operations[sequence_ & 1] = current_;
  own().announced.store(sequence_, std::memory_order_release);
  own().event.notify();
}

void Group::await_announcements(const Deadline& deadline) {
  bool agreed = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      RankControl& control = this->control(peer);
      wait(peer, deadline, [&] { return control.announced.load(std::memory_order_acquire) >= sequence_; });
      // A rank that gave up this operation, or an earlier one, will not finish it, whatever it announced.
      if (control.state.load(std::memory_order_acquire) == RankState::kFailed && control.failed_in <= sequence_) {
        throw PeerLost(describe_wait(peer) + loss_of(peer));
      }
      agreed = agreed && current_.agrees_with(announced(peer));
    }
  }
  if (!agreed) {
    throw_mismatch();
  }
}

void Group::throw_mismatch() {
  std::string table = "ranks called different collectives as operation #" + std::to_string(sequence_) + ":";
  for (int rank = 0; rank < size_; ++rank) {
    table += "\n  rank " + std::to_string(rank) + ": " + describe(announced(rank));
  }
  throw MismatchedCollective(
      table + "\nEvery rank must call the same collectives in the same order, with equal shapes and dtypes");
}

std::string Group::loss_of(int peer) {
  const RankControl& control = this->control(peer);
  const std::string who = "rank " + std::to_string(peer);
  switch (control.state.load(std::memory_order_acquire)) {
    case RankState::kFailed:
      return who + " failed: " + control.failure;
    case RankState::kLeft:
      return who + " has left the group without this operation";
    case RankState::kRunning:
      return "";
  }
  return who + " is in an unknown state";
}

bool Group::ended(int peer) {
  arena_->poll();
  return watches_[static_cast<std::size_t>(peer)].ended() || arena_->peer_closed(peer);
}

std::string Group::describe_wait(int peer) const {
  return describe(current_) + " (operation #" + std::to_string(sequence_) + ") on rank " + std::to_string(rank_) +
         " waited for rank " + std::to_string(peer) + ": ";
}

void Group::check_wait(int peer, const Deadline& deadline) {
  probe_();
  if (deadline.expired()) {
    const RankControl* const control = controls_[static_cast<std::size_t>(peer)];
    const std::uint64_t reached = control == nullptr ? 0 : control->announced.load(std::memory_order_acquire);
    throw Timeout(describe_wait(peer) + "nothing came for " + std::to_string(deadline.waited().count()) +
                  " ms; the last operation it reached is #" + std::to_string(reached) +
                  ". It may be stopped, slow, or in code that does not call this collective");
  }
}

std::shared_ptr<Segment> Group::peer_segment(int peer, std::uint32_t id, const Deadline& deadline) {
  while (true) {
    if (std::shared_ptr<Segment> segment = arena_->await_of_peer(peer, id, std::chrono::milliseconds(50))) {
      return segment;
    }
    if (ended(peer)) {
      throw PeerLost(describe_wait(peer) + "rank " + std::to_string(peer) + " has ended");
    }
    check_wait(peer, deadline);
  }
}

void Group::abort(const std::string& reason) noexcept {
  fail(reason, own().announced.load(std::memory_order_relaxed) + 1);
}

void Group::fail(const std::string& reason, std::uint64_t sequence) noexcept {
  if (::getpid() != owner_pid_) {
    return;
  }
  static std::mutex writing;
  const std::lock_guard lock(writing);
  if (own().state.load(std::memory_order_relaxed) == RankState::kRunning) {
    std::snprintf(own().failure, kFailureBytes, "%s", reason.c_str());
    own().failed_in = sequence;
    own().state.store(RankState::kFailed, std::memory_order_release);
  }
  own().event.notify();
}

}  // namespace accelerate_cpp::comm
