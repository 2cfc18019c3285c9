// Meetings of the ranks of a Group: a rank finds out where the others are without disturbing them.
//
// While a rank is in a meeting, the next operation cannot complete, so a rank that has announced it stays there. Ranks
// in a meeting therefore reach the same answer, as long as none of them goes on before all have looked, and none starts
// another meeting before all have left this one.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/fingerprint.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/wait_graph.h"

namespace accelerate_cpp::comm {
namespace {

// The number of a meeting after operation `sequence`; never 0.
std::uint64_t number_of(const std::string& topic, std::uint64_t sequence) {
  Fingerprint fingerprint;
  fingerprint.mix(sequence);
  fingerprint.mix(topic);
  return fingerprint.value() | 1;
}

// Says, for as long as it lives, that the owner is in a meeting.
class Attendance {
 public:
  Attendance(RankControl& own, std::uint64_t meeting) : own_(own) {
    own_.counted.store(0, std::memory_order_relaxed);
    own_.attendances.fetch_add(1, std::memory_order_relaxed);
    own_.meeting.store(meeting, std::memory_order_release);
    own_.event.notify();
  }
  ~Attendance() {
    own_.meeting.store(0, std::memory_order_release);
    own_.attendances.fetch_add(1, std::memory_order_release);
    own_.awaited_in_collective.store(RankControl::kNobody, std::memory_order_seq_cst);
    own_.event.notify();
  }
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

 private:
  RankControl& own_;
};

}  // namespace

Group::Whereabouts Group::whereabouts(int peer, std::uint64_t meeting, bool look_closely) {
  if (own().state.load(std::memory_order_acquire) == RankState::kFailed) {
    return Whereabouts::kElsewhere;  // whoever is still in the meeting that failed
  }
  const RankControl& control = this->control(peer);
  const std::uint64_t theirs = control.meeting.load(std::memory_order_acquire);
  if (theirs == meeting) {
    return Whereabouts::kHere;
  }
  if (control.announced.load(std::memory_order_acquire) > sequence_ || (theirs != 0 && peer > rank_)) {
    return Whereabouts::kElsewhere;
  }
  if (const Loss lost = loss_of(peer, look_closely); lost.left) {
    return Whereabouts::kElsewhere;
  } else if (lost) {
    throw_lost(peer, lost);  // it might have come
  }
  for (int other = 0; other < size_ && look_closely && theirs == 0; ++other) {
    const bool here = this->control(other).meeting.load(std::memory_order_acquire) == meeting;
    if (here && waits_for(*this, peer, other, /*unlooked_counts=*/false)) {
      return Whereabouts::kElsewhere;
    }
  }
  return Whereabouts::kUnknown;
}

std::vector<int> Group::meet(const std::string& topic, const Call& call) {
  const std::lock_guard lock(mutex_);
  if (forked()) {
    throw_unusable(name(CallKind::kMeeting));
  }
  try {
    return find_those_in(topic, call);
  } catch (const PeerLost& error) {
    fail(error.what(), number_);
    throw;
  }
}

std::vector<int> Group::find_those_in(const std::string& topic, const Call& call) {
  current_ = {{CallKind::kMeeting}};
  location_ = call.location;
  stalled_since_.reset();
  warned_ = false;
  number_ = next_sequence();
  const auto still_there = [this](const Met& met) {
    return control(met.rank).attendances.load(std::memory_order_acquire) == met.attendance;
  };
  for (const Met& met : std::exchange(met_, {})) {
    wait(met.rank, call.deadline, [&] { return met.rank == rank_ || !still_there(met) || loss_of(met.rank, true); });
  }
  const std::uint64_t meeting = number_of(topic, sequence_);
  const Attendance attendance(own(), meeting);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || await_whereabouts(peer, meeting, call.deadline) == Whereabouts::kHere) {
      met_.push_back({peer, control(peer).attendances.load(std::memory_order_acquire)});
    }
  }
  own().counted.store(meeting, std::memory_order_release);
  own().event.notify();
  std::vector<int> here;
  for (const Met& met : met_) {
    const RankControl& control = this->control(met.rank);
    wait(met.rank, call.deadline,
         [&] { return control.counted.load(std::memory_order_acquire) == meeting || !still_there(met); });
    here.push_back(met.rank);
  }
  return here;
}

Group::Whereabouts Group::await_whereabouts(int peer, std::uint64_t meeting, const Deadline& deadline) {
  Whereabouts found = whereabouts(peer, meeting, false);
  if (found != Whereabouts::kUnknown) {
    return found;
  }
  const Waiting waiting;
  const auto known = [&](bool look_closely) {
    found = found == Whereabouts::kUnknown ? whereabouts(peer, meeting, look_closely) : found;
    return found != Whereabouts::kUnknown;
  };
  control(peer).event.wait_until([&] { return known(false); }, spin_limits_,
                                 [&] {
                                   if (!known(true)) {
                                     check_wait(peer, deadline);
                                   }
                                 });
  return found;
}

}  // namespace accelerate_cpp::comm
