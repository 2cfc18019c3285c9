#include "core/comm/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/comm/arguments.h"
#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::chrono::milliseconds kCheckInterval{50};
// A thread that waits no longer than this does other things in between, so its rank is not stuck.
constexpr std::chrono::milliseconds kBriefWait{1000};

}  // namespace

class PointToPoint::Handle final : public Transfer {
 public:
  Handle(std::shared_ptr<PointToPoint> engine, PostedPointer posted)
      : engine_(std::move(engine)), posted_(std::move(posted)) {}

  bool poll() noexcept override { return engine_->poll(posted_); }
  void wait(Deadline deadline) override { engine_->wait(posted_, deadline); }
  int source() const override {
    const std::lock_guard lock(engine_->mutex_);
    return posted_->source;
  }

 private:
  const std::shared_ptr<PointToPoint> engine_;
  const PostedPointer posted_;
};

PointToPoint::PointToPoint(std::shared_ptr<Group> group, std::size_t pool_bytes)
    : group_(std::move(group)),
      outgoing_(group_, pool_bytes),
      incoming_(group_),
      waits_(group_->own()),
      held_back_(static_cast<std::size_t>(group_->size())),
      wishes_(static_cast<std::size_t>(group_->size())),
      refused_(static_cast<std::size_t>(group_->size())) {}

std::shared_ptr<Transfer> PointToPoint::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                             const Call& call) {
  check_peer("send", destination, group_->rank(), group_->size());
  auto* const bytes = const_cast<std::byte*>(data.bytes());
  return post(std::make_shared<Posted>(Posted{true, bytes, data.size_bytes(), data.count, data.dtype, destination, tag,
                                              call.deadline, std::string(call.location)}));
}

std::shared_ptr<Transfer> PointToPoint::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  if (source != Communicator::kAnySource) {
    check_peer("receive", source, group_->rank(), group_->size());
  }
  return post(std::make_shared<Posted>(Posted{false, data.bytes(), data.size_bytes(), data.count, data.dtype, source,
                                              tag, call.deadline, std::string(call.location)}));
}

std::shared_ptr<Transfer> PointToPoint::post(const PostedPointer& posted) {
  group_->check_usable([this](const Posted& transfer) { return describe(transfer); }, *posted);
  const std::lock_guard lock(mutex_);
  if (posted->is_send) {
    if (const Group::Loss lost = group_->loss_of(posted->peer, false)) {
      lost.raise(describe(*posted) + ": ");
    }
  }
  posted->last_check = std::chrono::steady_clock::now();
  posted_.push_back(posted);
  try {
    progress();
  } catch (...) {  // the caller has no transfer, and its memory is its own again
    end(*posted, std::current_exception());
    throw;
  }
  return std::make_shared<Handle>(shared_from_this(), posted);
}

void PointToPoint::progress() {
  incoming_.look();
  pass_on_refusals();
  std::fill(wishes_.begin(), wishes_.end(), 0);
  for (std::vector<std::uint64_t>& tags : held_back_) {
    tags.clear();
  }
  for (auto entry = posted_.begin(); entry != posted_.end();) {
    Posted& posted = **entry;
    try {
      posted.ended = posted.is_send ? try_send(posted) : try_receive(posted);
    } catch (...) {
      fail(posted, std::current_exception());
    }
    entry = posted.ended ? posted_.erase(entry) : std::next(entry);
  }
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer != group_->rank()) {
      outgoing_.set_held_back(peer, !held_back_[static_cast<std::size_t>(peer)].empty());
      incoming_.wish(peer, wishes_[static_cast<std::size_t>(peer)]);
    }
  }
}

void PointToPoint::pass_on_refusals() {
  for (int peer = 0; peer < group_->size(); ++peer) {
    std::optional<std::string>& refused = refused_[static_cast<std::size_t>(peer)];
    if (const auto news = outgoing_.take_refusals(peer)) {
      refused = refused ? *refused + "; " + *news : *news;
    }
    const auto concerned = std::find_if(posted_.begin(), posted_.end(), [&](const PostedPointer& posted) {
      return refused && (posted->peer == peer || posted->peer == Communicator::kAnySource);
    });
    if (concerned != posted_.end()) {
      const std::string text =
          *std::exchange(refused, std::nullopt) + "; noticed in " + describe(**concerned) + kTransfersMustFit;
      fail(**concerned, std::make_exception_ptr(MismatchedCollective(text)));
      posted_.erase(concerned);
    }
  }
}

bool PointToPoint::may_exceed_limits(const Posted& send) {
  // As long as this rank is not stuck, it will reach what the others wait for.
  const bool stuck = group_->own().awaited_in_transfer.load(std::memory_order_relaxed) != RankControl::kNobody;
  return outgoing_.take_wish(send.peer, send.tag) || (stuck && waits_for(*group_, send.peer, group_->rank()));
}

bool PointToPoint::try_send(Posted& send) {
  // Later sends do not take the room that earlier ones wait for, and never overtake those with the same tag.
  std::vector<std::uint64_t>& earlier = held_back_[static_cast<std::size_t>(send.peer)];
  const bool in_turn = std::find(earlier.begin(), earlier.end(), send.tag) == earlier.end();
  std::optional<OutgoingMessages::Place> place;
  if (in_turn && earlier.empty()) {
    place = outgoing_.find_place(send.peer, send.size_bytes, false);
  }
  if (in_turn && !place && may_exceed_limits(send)) {
    place = outgoing_.find_place(send.peer, send.size_bytes, true);
  }
  if (!place) {
    earlier.push_back(send.tag);
    return false;
  }
  outgoing_.post(*place, {send.data, send.count, send.dtype}, send.peer, send.tag);
  return true;
}

bool PointToPoint::take_message(Posted& receive, int source) {
  Message* const message = incoming_.take(source, receive.tag);
  if (message == nullptr) {
    return false;
  }
  receive.source = source;
  if (message->dtype != receive.dtype || message->count != receive.count) {
    const int sender = group_->hooks().number_of(source);
    const MismatchedCollective mismatch = text_of(receive).mismatch(sender, message->count, message->dtype);
    incoming_.refuse(*message, source, receive.count, receive.dtype);
    throw mismatch;
  }
  receive.message = message;
  return true;
}

bool PointToPoint::copy_out(Posted& receive) {
  Message& message = *receive.message;
  // A peer's memory may be damaged: no more is written than the receive has room for.
  const std::size_t written =
      std::min<std::size_t>(message.written.load(std::memory_order_acquire), receive.size_bytes);
  if (written > receive.copied_bytes) {
    const std::uint64_t offset_bytes = read_once(message.offset_bytes);
    const std::shared_ptr<Segment> segment = group_->arena()->of_peer(receive.source, read_once(message.segment));
    if (!segment) {
      return false;
    }
    require_bytes(*segment, offset_bytes, written, group_->hooks().number_of(receive.source));
    std::memcpy(receive.data + receive.copied_bytes, segment->data() + offset_bytes + receive.copied_bytes,
                written - receive.copied_bytes);
    receive.copied_bytes = written;
  }
  if (receive.copied_bytes < receive.size_bytes) {
    return false;
  }
  incoming_.release(message, receive.source);
  return true;
}

bool PointToPoint::try_receive(Posted& receive) {
  const bool any = receive.peer == Communicator::kAnySource;
  const int last = any ? group_->size() - 1 : receive.peer;
  for (int source = any ? 0 : receive.peer; source <= last && receive.message == nullptr; ++source) {
    if (source != group_->rank()) {
      take_message(receive, source);
    }
  }
  if (receive.message == nullptr) {
    wish(receive);
    return false;
  }
  return copy_out(receive);
}

void PointToPoint::wish(const Posted& receive) {
  for (int source = 0; source < group_->size(); ++source) {
    if (receive.peer == source || receive.peer == Communicator::kAnySource) {
      wishes_[static_cast<std::size_t>(source)] |= tag_bit(receive.tag);
    }
  }
}

std::uint32_t PointToPoint::awaited(const Posted& posted) const {
  if (posted.ended || posted.message != nullptr) {
    return RankControl::kNobody;
  }
  return posted.peer == Communicator::kAnySource ? RankControl::kAnybody : static_cast<std::uint32_t>(posted.peer) + 1;
}

void PointToPoint::tell_of_wait(const Posted& posted) {
  for (int peer = 0; peer < group_->size(); ++peer) {
    const bool concerned = posted.peer == peer || posted.peer == Communicator::kAnySource;
    if (peer != group_->rank() && concerned && (posted.is_send || incoming_.held_back(peer))) {
      group_->control(peer).doorbell.notify();
    }
  }
}

bool PointToPoint::poll(const PostedPointer& posted) {
  if (group_->forked()) {
    return true;  // wait() says why
  }
  const std::lock_guard lock(mutex_);
  if (posted->ended) {
    return true;
  }
  try {
    progress();
    check_now_and_then(*posted);
  } catch (...) {
    end(*posted, std::current_exception());  // wait() raises it
  }
  return posted->ended;
}

bool PointToPoint::check_now_and_then(Posted& posted) {
  const auto now = std::chrono::steady_clock::now();
  if (posted.ended || now - posted.last_check < kCheckInterval) {
    return false;
  }
  posted.last_check = now;
  check(posted);
  return true;
}

void PointToPoint::wait(const PostedPointer& posted, const Deadline& deadline) {
  if (group_->forked()) {
    group_->check_usable([this](const Posted& transfer) { return describe(transfer); }, *posted);
  }
  const Waiting waiting;
  const bool brief = deadline.remaining() <= kBriefWait;
  PublishedWaits::Wait published(waits_);
  EventWord& doorbell = group_->own().doorbell;
  const int looks = group_->spin_limits().looks / 4;
  bool slept = false;
  for (int look = 0;; ++look) {
    const std::uint32_t seen = doorbell.value.load(std::memory_order_seq_cst);
    bool look_closely = false;
    bool told = false;
    std::string report;
    {
      const std::lock_guard lock(mutex_);
      if (!posted->ended) {
        progress();
      }
      look_closely = check_now_and_then(*posted);
      report = look_closely ? report_of_wait(*posted) : "";
      if (posted->ended) {
        if (posted->error) {
          std::rethrow_exception(posted->error);
        }
        return;
      }
      group_->own().doorbell_seen.store(seen, std::memory_order_seq_cst);
      told = slept && !brief && published.set(awaited(*posted));
      if (told) {  // that may have been all that was missing, so look again before sleeping
        tell_of_wait(*posted);
      }
    }
    if (look_closely) {  // without the mutex: hooks may need locks that another thread holds while it polls
      group_->hooks().probe();
    }
    if (!report.empty()) {
      group_->hooks().warn(report);
    }
    if (deadline.expired()) {
      throw Timeout(describe(*posted) + " has not completed after " + std::to_string(deadline.waited().count()) +
                    " ms" + group_->standings());
    }
    if (look >= looks && !told) {
      slept = true;
      doorbell.sleep(seen, std::min(kCheckInterval, std::max(deadline.remaining(), std::chrono::milliseconds(1))));
    }
  }
}

Group::Loss PointToPoint::loss_of_any() {
  Group::Loss last;
  int left = 0;
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer == group_->rank()) {
      continue;
    }
    const Group::Loss lost = group_->loss_of(peer, true);
    if (lost && !lost.left) {
      return lost;
    }
    left += lost ? 1 : 0;
    last = lost ? lost : last;
  }
  return left == group_->size() - 1 ? Group::Loss{last.reason} : Group::Loss{};
}

void PointToPoint::check(Posted& posted) {
  const bool from_any = posted.peer == Communicator::kAnySource;
  const Group::Loss lost = from_any ? loss_of_any() : group_->loss_of(posted.peer, true);
  if (lost) {
    progress();  // what the peer had sent before its end counts
  }
  if (posted.ended) {
    return;
  }
  try {
    group_->check_usable([this](const Posted& transfer) { return describe(transfer); }, posted);
    if (lost) {
      lost.raise(describe(posted) + ": ");
    }
    if (posted.deadline.expired()) {
      throw Timeout(describe(posted) + ": nothing came for " + std::to_string(posted.deadline.waited().count()) +
                    " ms" + group_->standings());
    }
  } catch (...) {
    end(posted, std::current_exception());
  }
}

std::string PointToPoint::report_of_wait(Posted& posted) const {
  if (posted.ended || posted.warned || posted.deadline.waited() < group_->hooks().warn_after) {
    return "";
  }
  posted.warned = true;
  return describe(posted) + " has waited for " + std::to_string(posted.deadline.waited().count() / 1000) + " s" +
         group_->standings();
}

void PointToPoint::end(Posted& posted, std::exception_ptr error) {
  fail(posted, std::move(error));
  posted_.remove_if([&posted](const PostedPointer& entry) { return entry.get() == &posted; });
}

void PointToPoint::fail(Posted& posted, std::exception_ptr error) {
  posted.ended = true;
  posted.error = std::move(error);
  if (posted.message != nullptr) {
    incoming_.release(*posted.message, posted.source);
  }
}

TransferText PointToPoint::text_of(const Posted& posted) const {
  const WaitHooks& hooks = group_->hooks();
  const int peer = posted.peer == Communicator::kAnySource ? posted.peer : hooks.number_of(posted.peer);
  return {posted.is_send, posted.count, posted.dtype, peer, posted.tag, hooks.number_of(group_->rank()),
          posted.location};
}

}  // namespace accelerate_cpp::comm
