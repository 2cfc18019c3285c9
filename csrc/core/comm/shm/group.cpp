#include "core/comm/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <utility>

#include "core/base/background.h"
#include "core/base/check.h"
#include "core/base/cores.h"
#include "core/base/round_up.h"
#include "core/comm/first_failure.h"
#include "core/comm/shm/mesh.h"

namespace accelerate_cpp::comm {
namespace {

// A look takes about 20 ns, or 300 ns with a yield; being woken takes about 10 µs on bare metal and 50 µs or more on a
// virtual machine. So 150 µs of looking before sleeping costs no more than a few wake-ups. The thread starts to yield
// after 10 µs, since other processes may want the core.
constexpr SpinLimits kOnCoresOfTheirOwn{500, 500};
// With more ranks than cores, the awaited rank may need this very core, so the thread yields after each look: that
// takes a switch, but no wake-up.
constexpr SpinLimits kOnSharedCores{1, 100};

// The number of operations after which the sockets are checked, to unmap segments that peers have released.
constexpr std::uint64_t kPollInterval = 64;

// How long a rank that leaves waits until peers that do not read are told of its last messages.
constexpr std::chrono::milliseconds kLastNews{2000};

// Written before peers can see the control block.
void publish_cores(RankControl& control) {
  const CoreSet cores = CoreSet::of_thread();
  for (std::size_t i = 0; i < CoreSet::kWords; ++i) {
    control.cores[i].store(cores.words()[i], std::memory_order_relaxed);
  }
  const CpuQuota quota = cpu_quota();
  control.quota_cores.store(quota.cores, std::memory_order_relaxed);
  control.quota_group.store(quota.group, std::memory_order_relaxed);
}

int checked_rank(int rank, int size) {
  if (rank < 0 || rank >= size) {
    throw InvalidArgument("rank " + std::to_string(rank) + " is not within a group of " + std::to_string(size));
  }
  return rank;
}

}  // namespace

Group::Group(Store& store, int rank, int size, std::size_t extra_bytes, Deadline deadline, WaitHooks hooks)
    : rank_(checked_rank(rank, size)),
      size_(size),
      hooks_(std::move(hooks)),
      control_bytes_(round_up(kCountsOffset + 4 * sizeof(std::uint64_t) * static_cast<std::size_t>(size), 4096)),
      arena_(std::make_shared<Arena>(connect_mesh(store, rank, size, deadline, hooks_))),
      segments_(static_cast<std::size_t>(size)),
      controls_(static_cast<std::size_t>(size)) {
  // Never released: a peer may map it after this rank has left, to read that it has.
  const Arena::Block block = arena_->create(
      control_bytes_ + extra_bytes, [](std::byte* data) { publish_cores(*reinterpret_cast<RankControl*>(data)); });
  ACCELERATE_CHECK(block.id == 0, "the control block is the first segment of its arena");
  segments_[static_cast<std::size_t>(rank)] = block.segment;
  // A segment is zero-filled, which is a fresh control block: peers may read it before this rank gets here.
  controls_[static_cast<std::size_t>(rank)] = reinterpret_cast<RankControl*>(block.segment->data());
  own().pid = ::getpid();
  for (int peer = 0; peer < size; ++peer) {
    watches_.emplace_back(peer == rank ? 0 : arena_->peer_pid(peer));
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      segments_[static_cast<std::size_t>(peer)] = peer_segment(peer, 0, deadline);
      require_bytes(*segments_[static_cast<std::size_t>(peer)], 0, control_bytes_ + extra_bytes,
                    hooks_.number_of(peer));
      controls_[static_cast<std::size_t>(peer)] =
          reinterpret_cast<RankControl*>(segments_[static_cast<std::size_t>(peer)]->data());
    }
  }
  cores_ = count_cores();
  spin_limits_ = cores_ >= size_ ? kOnCoresOfTheirOwn : kOnSharedCores;
}

double Group::count_cores() const {
  CoreSet cores;
  std::map<std::uint64_t, double> quotas;
  bool all_limited = true;
  for (const RankControl* const control : controls_) {
    CoreSet::Words words{};
    for (std::size_t i = 0; i < CoreSet::kWords; ++i) {
      words[i] = control->cores[i].load(std::memory_order_relaxed);
    }
    cores |= CoreSet(words);
    const double quota = control->quota_cores.load(std::memory_order_relaxed);
    all_limited = all_limited && quota > 0.0;
    quotas[control->quota_group.load(std::memory_order_relaxed)] = quota;
  }
  double together = 0.0;
  for (const auto& [group, quota] : quotas) {
    together += quota;
  }
  return all_limited ? std::min(static_cast<double>(cores.count()), together) : cores.count();
}

Group::~Group() {
  leave();
}

void Group::leave() noexcept {
  if (forked()) {
    return;
  }
  arena_->tell_all(kLastNews);  // what was sent can still be received
  RankState expected = RankState::kRunning;
  own().state.compare_exchange_strong(expected, RankState::kLeft);
  own().event.notify();
}

bool Group::someone_has_left() {
  bool left = false;
  for (int peer = 0; peer < size_; ++peer) {
    left = left || (peer != rank_ && control(peer).state.load(std::memory_order_acquire) == RankState::kLeft);
  }
  return left;
}

bool Group::usable() const {
  return !forked() && control(rank_).state.load(std::memory_order_acquire) != RankState::kFailed;
}

void Group::throw_unusable(const std::string& what) const {
  if (forked()) {
    throw communicator_of_parent(what, hooks_.name_of(rank_));
  }
  throw group_failed(what, hooks_.number_of(rank_), control(rank_).failure_text());
}

std::uint64_t* Group::counts(int rank, std::uint64_t sequence) const {
  auto* const tables = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&control(rank)) + kCountsOffset);
  return tables + (sequence & 1) * 2 * static_cast<std::size_t>(size_);
}

void Group::set_counts(const std::vector<std::uint64_t>& given, const std::vector<std::uint64_t>& expected) {
  std::uint64_t* const table = counts(rank_, next_sequence());
  std::copy(given.begin(), given.end(), table);
  std::copy(expected.begin(), expected.end(), table + size_);
}

bool Group::counts_fit() const {
  for (int giver = 0; giver < size_; ++giver) {
    for (int taker = 0; taker < size_; ++taker) {
      if (given(giver, taker) != expected(taker, giver)) {
        return false;
      }
    }
  }
  return true;
}

void Group::place_in_arena(Operation& operation, const void* data, std::size_t size_bytes) const {
  // Below this, copying into a slot is cheaper than the second wait that working in place takes.
  constexpr std::size_t kInPlaceBytes = 8 * 1024;
  if (size_bytes < kInPlaceBytes) {
    return;
  }
  if (const auto place = arena_->find(data, size_bytes)) {
    operation.in_arena = true;
    operation.segment = place->segment;
    operation.offset_bytes = place->offset_bytes;
  }
}

void Group::announce() {
  ++sequence_;
  if (sequence_ % kPollInterval == 0) {
    arena_->poll();
  }
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
      check_withdrawals();
      // A rank that failed in this operation or an earlier one will not finish this one, even if it has announced it.
      if (control.state.load(std::memory_order_acquire) == RankState::kFailed && control.failed_in <= sequence_) {
        throw_lost(peer, loss_of(peer, false));
      }
      agreed = agreed && current_.agrees_with(announced(peer));
    }
  }
  if (!agreed || (current_.has_counts && !counts_fit())) {
    throw_mismatch();
  }
}

void Group::Loss::raise(const std::string& wait) const {
  if (left) {
    throw PeerLeft(wait + reason);
  }
  throw PeerLost(wait + reason);
}

Group::Loss Group::loss_of(int peer, bool look_closely) {
  const RankControl& control = this->control(peer);
  const std::string who = hooks_.name_of(peer);
  bool ended = false;
  if (look_closely) {
    arena_->poll();
    ended = watches_[static_cast<std::size_t>(peer)].ended() || arena_->peer_closed(peer);
  }
  // Read after the look: a process that has ended writes nothing more.
  switch (control.state.load(std::memory_order_acquire)) {
    case RankState::kFailed:
      return {who + " failed: " + control.failure_text()};
    case RankState::kLeft:
      return {who + " has left the group without this operation" + standings(), true};
    default:
      return ended ? Loss{who + " has ended" + standings()} : Loss{};
  }
}

Group::Loss Group::loss_during_wait(int peer, bool look_closely) {
  Loss lost = loss_of(peer, look_closely);
  if (!lost && own().state.load(std::memory_order_acquire) == RankState::kFailed) {
    return {"the group was aborted on this rank: " + own().failure_text()};
  }
  for (int other = 0; other < size_ && !lost && look_closely; ++other) {
    const RankControl& control = this->control(other);
    const bool failed = control.state.load(std::memory_order_acquire) == RankState::kFailed;
    // A rank that has finished this operation may leave.
    const bool absent =
        failed ? control.failed_in <= sequence_ : control.announced.load(std::memory_order_acquire) < sequence_;
    if (other != rank_ && absent) {
      lost = loss_of(other, true);
    }
  }
  return lost;
}

void Group::check_wait(int peer, const Deadline& deadline) {
  hooks_.probe();
  const auto now = std::chrono::steady_clock::now();
  if (!stalled_since_) {
    stalled_since_ = now;
  }
  publish_place();
  if (deadline.expired()) {
    throw Timeout(describe_wait(peer) + "nothing came for " + std::to_string(deadline.waited().count()) +
                  " ms; it may be stopped, slow, or in code that does not call this collective" + standings());
  }
  if (!warned_ && now - *stalled_since_ >= hooks_.warn_after) {
    warned_ = true;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - *stalled_since_).count();
    hooks_.warn(describe_wait(peer) + "for " + std::to_string(seconds) + " s now" + standings());
  }
}

std::byte* Group::operand(int peer, std::size_t begin_bytes, std::size_t size_bytes, const Deadline& deadline) {
  const std::uint64_t offset_bytes = read_once(announced(peer).offset_bytes);
  const std::shared_ptr<Segment> segment = peer_segment(peer, read_once(announced(peer).segment), deadline);
  require_bytes(*segment, offset_bytes, begin_bytes, hooks_.number_of(peer));
  require_bytes(*segment, offset_bytes + begin_bytes, size_bytes, hooks_.number_of(peer));
  return segment->data() + offset_bytes + begin_bytes;
}

void Group::take_in_segments() {
  for (int rank = 0; rank < size_; ++rank) {
    if (announced(rank).in_arena) {
      return arena_->poll();
    }
  }
}

std::shared_ptr<Segment> Group::peer_segment(int peer, std::uint32_t id, const Deadline& deadline) {
  while (true) {
    if (std::shared_ptr<Segment> segment = arena_->await_of_peer(peer, id, std::chrono::milliseconds(50))) {
      return segment;
    }
    arena_->poll();
    if (watches_[static_cast<std::size_t>(peer)].ended() || arena_->peer_closed(peer)) {
      if (std::shared_ptr<Segment> segment = arena_->of_peer(peer, id)) {
        return segment;
      }
      throw PeerLost(hooks_.name_of(rank_) + " waited for shared memory of " + hooks_.name_of(peer) +
                     ", which has ended");
    }
    hooks_.probe();
    if (deadline.expired()) {
      throw Timeout(hooks_.name_of(rank_) + " waited for shared memory of " + hooks_.name_of(peer) +
                    "; nothing came for " + std::to_string(deadline.waited().count()) + " ms");
    }
  }
}

void Group::withdraw(const std::string& reason, const Call& call) {
  run({{CallKind::kWithdrawal}}, call, [&] {
    own().withdrawals[number_ & 1].write(number_, reason.c_str());
    announce();
    count_interruption();
  });
}

void Group::check_withdrawals() {
  if (!running_.load(std::memory_order_relaxed) || number_ != sequence_) {
    return;
  }
  for (int peer = 0; peer < size_; ++peer) {
    const auto& withdrawal = control(peer).withdrawals[sequence_ & 1];
    if (peer != rank_ && withdrawal.is_of(sequence_)) {
      publish_place();
      throw PeerWithdrew(describe_wait(peer) + hooks_.name_of(peer) + " withdrew: " + std::string(withdrawal.read()));
    }
  }
}

void Group::catch_up(const Deadline& deadline) {
  if (!behind_) {
    return;
  }
  for (int peer = 0; peer < size_; ++peer) {
    wait(peer, deadline,
         [&] { return peer == rank_ || control(peer).announced.load(std::memory_order_acquire) >= sequence_; });
  }
  behind_ = false;
}

void Group::count_interruption() noexcept {
  behind_ = true;
  own().interruptions.fetch_add(1, std::memory_order_release);
  own().event.notify();
}

void Group::await_interruptions(const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t seen = interruptions();
  for (int peer = 0; peer < size_; ++peer) {
    wait(peer, deadline, [&] { return control(peer).interruptions.load(std::memory_order_acquire) >= seen; });
  }
}

void Group::end_in_error() noexcept {
  const auto withdraw_or_fail = [this](const std::string& reason) {
    if (may_withdraw_) {
      own().withdrawals[number_ & 1].write(number_, reason.c_str());
      count_interruption();
    } else {
      fail(reason, number_);
    }
  };
  try {
    throw;
  } catch (const MismatchedCollective&) {
    count_interruption();
  } catch (const PeerWithdrew&) {
    count_interruption();
  } catch (const Error& error) {
    fail(error.what(), number_);
  } catch (const InternalError& error) {
    fail(error.what(), number_);
  } catch (const std::exception& error) {
    withdraw_or_fail(error.what());
  } catch (...) {
    withdraw_or_fail("an exception during " + current_.signature.describe(hooks_));
  }
}

void Group::abort(const std::string& reason) noexcept {
  const std::uint64_t announced = own().announced.load(std::memory_order_relaxed);
  fail(reason, running_.load(std::memory_order_relaxed) ? announced : announced + 1);
}

void Group::fail(const std::string& reason, std::uint64_t sequence) noexcept {
  if (forked()) {
    return;
  }
  static std::mutex writing;
  const std::lock_guard lock(writing);
  if (own().state.load(std::memory_order_relaxed) == RankState::kRunning) {
    std::snprintf(own().failure, RankControl::kFailureBytes, "%s", reason.c_str());
    own().failed_in = sequence;
    own().state.store(RankState::kFailed, std::memory_order_release);
  }
  own().event.notify();
}

}  // namespace accelerate_cpp::comm
