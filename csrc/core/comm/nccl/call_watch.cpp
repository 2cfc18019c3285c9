#include "core/comm/nccl/call_watch.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

// Ranks whose calls are read in one look: in a large group a look may not take longer than the pause between two.
constexpr int kPeersPerLook = 64;
constexpr std::chrono::milliseconds kExplanation{2000};

}  // namespace

CallWatch::CallWatch(NcclGroup& group, CallRecord record, std::uint64_t sequence, Deadline deadline)
    : group_(group),
      sequence_(sequence),
      patience_(deadline, group.options().hooks),
      next_look_(group.options().stall_after),
      calls_(static_cast<std::size_t>(group.size())) {
  calls_[static_cast<std::size_t>(group.rank())] = std::move(record);
}

std::string CallWatch::title() const {
  return calls_[static_cast<std::size_t>(group_.rank())]->describe() + " (operation " + std::to_string(sequence_) +
         ") on " + group_.place();
}

void CallWatch::pause() {
  patience_.pause();
  if (const auto failure = group_.failure(); failure.has_value()) {
    throw PeerLost(title() + ": " + failure->text);
  }
  const bool expired = patience_.expired();
  if (expired || patience_.waited() >= next_look_) {
    look();
    next_look_ = patience_.waited() + group_.options().stall_after;
  }
  if (expired) {
    throw Timeout(timeout_text());
  }
  if (patience_.warn_now()) {
    group_.options().hooks.warn(waiting_text());
  }
}

void CallWatch::publish() {
  CallRecord& own = *calls_[static_cast<std::size_t>(group_.rank())];
  if (own.location.empty()) {
    own.location = group_.options().hooks.call_site();
  }
  if (!published_) {
    published_ = true;
    group_.board().publish_call(sequence_, own);
  }
}

void CallWatch::read_calls() {
  for (int n = std::min(kPeersPerLook, group_.size()); n > 0; --n) {
    std::optional<CallRecord>& call = calls_[static_cast<std::size_t>(next_peer_)];
    if (!call.has_value()) {
      call = group_.board().call_of(next_peer_, sequence_);
    }
    next_peer_ = (next_peer_ + 1) % group_.size();
  }
}

void CallWatch::look() {
  publish();
  read_calls();
  // Before the calls are compared: a rank may call anything once the group has failed, and what failed is still there.
  const std::optional<GroupBoard::Failure> failure = group_.board().failure();
  if (failure.has_value()) {
    group_.fail(*failure, false);
    if (failure->is_mismatch && failure->sequence == sequence_) {
      throw MismatchedCollective(failure->text);
    }
    throw PeerLost(title() + ": " + failure->text);
  }
  if (const auto contradiction = find_contradiction(calls_); contradiction.has_value()) {
    throw MismatchedCollective(mismatch_text(*contradiction));
  }
  check_for_leavers();
}

void CallWatch::check_for_leavers() {
  for (int n = 0; n < std::min(kPeersPerLook, group_.size()); ++n) {
    const int peer = (next_peer_ + n) % group_.size();
    if (calls_[static_cast<std::size_t>(peer)].has_value()) {
      continue;
    }
    const std::optional<std::uint64_t> last = group_.board().last_operation_of(peer);
    if (last.has_value() && *last < sequence_) {
      throw PeerLost(title() + ": rank " + std::to_string(peer) + " has left the group after operation " +
                     std::to_string(*last) + ". Every rank must call the same operations");
    }
  }
}

std::string CallWatch::explain_mismatch() {
  publish();
  const Deadline deadline = Deadline::after(std::min(kExplanation, patience_.deadline().remaining()));
  for (int peer = 0; peer < group_.size(); ++peer) {
    std::optional<CallRecord>& call = calls_[static_cast<std::size_t>(peer)];
    if (!call.has_value()) {
      call = group_.board().call_of(peer, sequence_, deadline);
    }
  }
  return mismatch_text(find_contradiction(calls_).value_or("their calls do not fit together"));
}

std::string CallWatch::mismatch_text(const std::string& contradiction) const {
  return "operation " + std::to_string(sequence_) + " of this group of " + std::to_string(group_.size()) +
         " ranks: " + contradiction + ". Every rank must call the same operations in the same order, with operands " +
         "that fit together" + table_of(calls_);
}

std::string CallWatch::timeout_text() const {
  return title() + " had not finished after " + std::to_string(patience_.deadline().waited().count()) +
         " ms. Either another rank is late, which a longer timeout allows for, or it is lost" + table_of(calls_);
}

std::string CallWatch::waiting_text() const {
  return title() + " has been waiting for " + std::to_string(patience_.waited().count()) + " ms and goes on waiting" +
         table_of(calls_);
}

}  // namespace accelerate_cpp::comm
