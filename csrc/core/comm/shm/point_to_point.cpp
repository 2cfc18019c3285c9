#include "core/comm/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kChunkBytes = 256 * 1024;  // copied between two signs of progress
constexpr std::chrono::milliseconds kCheckInterval{50};

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
      pool_(group_->arena(), pool_bytes),
      sent_(static_cast<std::size_t>(group_->size())),
      taken_(static_cast<std::size_t>(group_->size())),
      visible_(static_cast<std::size_t>(group_->size())),
      mailboxes_(static_cast<std::size_t>(group_->size())),
      peer_outboxes_(static_cast<std::size_t>(group_->size())) {}

std::shared_ptr<Transfer> PointToPoint::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                             const Call& call) {
  if (destination < 0 || destination >= group_->size() || destination == group_->rank()) {
    throw InvalidArgument("send: rank " + std::to_string(destination) + " is not another rank of this group of " +
                          std::to_string(group_->size()));
  }
  auto* const bytes = const_cast<std::byte*>(data.bytes());
  return post(std::make_shared<Posted>(Posted{true, bytes, data.size_bytes(), data.count, data.dtype, destination, tag,
                                              call.deadline, std::string(call.location)}));
}

std::shared_ptr<Transfer> PointToPoint::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  if (source != Communicator::kAnySource && (source < 0 || source >= group_->size() || source == group_->rank())) {
    throw InvalidArgument("receive: rank " + std::to_string(source) + " is not another rank of this group of " +
                          std::to_string(group_->size()));
  }
  return post(std::make_shared<Posted>(Posted{false, data.bytes(), data.size_bytes(), data.count, data.dtype, source,
                                              tag, call.deadline, std::string(call.location)}));
}

std::shared_ptr<Transfer> PointToPoint::post(const PostedPointer& posted) {
  group_->check_usable([this](const Posted& transfer) { return describe(transfer); }, *posted);
  const std::lock_guard lock(mutex_);
  if (posted->is_send) {
    const std::string lost = group_->loss_of(posted->peer, false);
    if (!lost.empty()) {
      throw PeerLost(describe(*posted) + ": " + lost);
    }
  }
  posted->last_check = std::chrono::steady_clock::now();
  posted_.push_back(posted);
  progress();
  return std::make_shared<Handle>(shared_from_this(), posted);
}

// A message may come while receives look for theirs: one that was missed by an earlier receive, or at an earlier slot,
// would be overtaken by a later one. So all of them look at the messages that had been posted before.
void PointToPoint::look_for_messages() {
  for (int source = 0; source < group_->size(); ++source) {
    const Mailbox* const box = source == group_->rank() ? nullptr : mailbox_of(source);
    visible_[static_cast<std::size_t>(source)] = box == nullptr ? 0 : box->posted.load(std::memory_order_acquire);
  }
}

void PointToPoint::progress() {
  look_for_messages();
  std::vector<bool> blocked(sent_.size(), false);  // a later send to a rank may not overtake an earlier one
  for (auto entry = posted_.begin(); entry != posted_.end();) {
    Posted& posted = **entry;
    try {
      if (!posted.is_send) {
        posted.ended = try_receive(posted);
      } else if (!blocked[static_cast<std::size_t>(posted.peer)]) {
        posted.ended = try_send(posted);
        blocked[static_cast<std::size_t>(posted.peer)] = !posted.ended;
      }
    } catch (...) {
      fail(posted, std::current_exception());
    }
    entry = posted.ended ? posted_.erase(entry) : std::next(entry);
  }
}

std::byte* PointToPoint::own_outbox() {
  if (!outbox_) {
    const Arena::Block block = group_->arena()->create(outbox_bytes(group_->size()));
    outbox_ = block.segment;
    outbox_id_ = block.id;
    group_->own().outbox.store(block.id + 1, std::memory_order_release);
  }
  return outbox_->data();
}

std::byte* PointToPoint::find_room(Message& message, int destination, std::size_t slot, std::size_t size_bytes) {
  pool_.reclaim();  // before a slot that still counts as the user of a block is used again
  if (size_bytes > kInlineBytes) {
    return pool_.take(message, size_bytes);
  }
  message.segment = outbox_id_;
  message.offset_bytes = inline_offset(group_->size(), destination, slot);
  return own_outbox() + message.offset_bytes;
}

bool PointToPoint::try_send(Posted& send) {
  Mailbox& box = mailbox(own_outbox(), send.peer);
  const auto is_free = [](const Message& message) {
    return message.state.load(std::memory_order_acquire) == MessageState::kFree;
  };
  Message* const message = std::find_if(std::begin(box.messages), std::end(box.messages), is_free);
  const auto slot = static_cast<std::size_t>(message - box.messages);
  std::byte* const room = slot == kMessages ? nullptr : find_room(*message, send.peer, slot, send.size_bytes);
  if (room == nullptr) {
    return false;
  }
  message->tag = send.tag;
  message->count = send.count;
  message->dtype = send.dtype;
  message->order = sent_[static_cast<std::size_t>(send.peer)]++;
  message->written.store(0, std::memory_order_relaxed);
  message->state.store(MessageState::kPosted, std::memory_order_release);
  box.posted.store(sent_[static_cast<std::size_t>(send.peer)], std::memory_order_release);
  EventWord& doorbell = group_->control(send.peer).doorbell;
  std::size_t begin = 0;
  do {
    const std::size_t length = std::min(kChunkBytes, send.size_bytes - begin);
    if (length > 0) {
      std::memcpy(room + begin, send.data + begin, length);
    }
    begin += length;
    message->written.store(begin, std::memory_order_release);
    doorbell.notify();
  } while (begin < send.size_bytes);
  return true;
}

Mailbox* PointToPoint::mailbox_of(int source) {
  const auto index = static_cast<std::size_t>(source);
  if (mailboxes_[index] == nullptr) {
    const std::uint32_t outbox = group_->control(source).outbox.load(std::memory_order_acquire);
    if (outbox != 0) {
      peer_outboxes_[index] = group_->arena()->of_peer(source, outbox - 1);
    }
    if (peer_outboxes_[index]) {
      mailboxes_[index] = &mailbox(peer_outboxes_[index]->data(), group_->rank());
    }
  }
  return mailboxes_[index];
}

bool PointToPoint::take_message(Posted& receive, int source) {
  Mailbox* const box = mailbox_of(source);
  const std::uint64_t visible = visible_[static_cast<std::size_t>(source)];
  if (box == nullptr || visible <= taken_[static_cast<std::size_t>(source)]) {
    return false;
  }
  Message* oldest = nullptr;
  for (Message& message : box->messages) {
    if (message.state.load(std::memory_order_acquire) == MessageState::kPosted && message.order < visible &&
        message.tag == receive.tag && (oldest == nullptr || message.order < oldest->order)) {
      oldest = &message;
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  oldest->state.store(MessageState::kTaken, std::memory_order_relaxed);
  ++taken_[static_cast<std::size_t>(source)];
  receive.message = oldest;
  receive.source = source;
  if (oldest->dtype != receive.dtype || oldest->count != receive.count) {
    const std::string report = "rank " + std::to_string(source) + " sent " + std::to_string(oldest->count) + " " +
                               accelerate_cpp::name(oldest->dtype) + " with tag " + std::to_string(receive.tag) +
                               ", but the matching call was " + describe(receive);
    group_->abort(report);
    throw MismatchedCollective(report + ". Send and receive tensors must have equal shapes and dtypes");
  }
  return true;
}

bool PointToPoint::copy_out(Posted& receive) {
  Message& message = *receive.message;
  const std::size_t written = message.written.load(std::memory_order_acquire);
  if (written > receive.copied_bytes) {
    const std::shared_ptr<Segment> segment = group_->arena()->of_peer(receive.source, message.segment);
    if (!segment) {
      return false;
    }
    std::memcpy(receive.data + receive.copied_bytes, segment->data() + message.offset_bytes + receive.copied_bytes,
                written - receive.copied_bytes);
    receive.copied_bytes = written;
  }
  if (receive.copied_bytes < receive.size_bytes) {
    return false;
  }
  message.state.store(MessageState::kFree, std::memory_order_release);
  group_->control(receive.source).doorbell.notify();
  return true;
}

bool PointToPoint::try_receive(Posted& receive) {
  if (receive.message == nullptr) {
    const bool any = receive.peer == Communicator::kAnySource;
    const int first = any ? 0 : receive.peer;
    const int last = any ? group_->size() - 1 : receive.peer;
    for (int source = first; source <= last && receive.message == nullptr; ++source) {
      if (source != group_->rank()) {
        take_message(receive, source);
      }
    }
  }
  return receive.message != nullptr && copy_out(receive);
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
  EventWord& doorbell = group_->own().doorbell;
  for (int look = 0;; ++look) {
    const std::uint32_t seen = doorbell.value.load(std::memory_order_seq_cst);
    bool look_closely = false;
    std::string report;
    {
      const std::lock_guard lock(mutex_);
      if (!posted->ended) {
        progress();
      }
      look_closely = check_now_and_then(*posted);
      if (look_closely) {
        report = report_of_wait(*posted);
      }
      if (posted->ended) {
        if (posted->error) {
          std::rethrow_exception(posted->error);
        }
        return;
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
    if (look >= group_->spin_limits().looks / 4) {
      doorbell.sleep(seen, std::min(kCheckInterval, std::max(deadline.remaining(), std::chrono::milliseconds(1))));
    }
  }
}

std::string PointToPoint::loss_of_any() {
  std::string last;
  int left = 0;
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer == group_->rank()) {
      continue;
    }
    const std::string lost = group_->loss_of(peer, true);
    const bool in_good_order = group_->control(peer).state.load(std::memory_order_acquire) == RankState::kLeft;
    if (!lost.empty() && !in_good_order) {
      return lost;
    }
    left += lost.empty() ? 0 : 1;
    last = lost.empty() ? last : lost;
  }
  return left == group_->size() - 1 ? last : "";
}

void PointToPoint::check(Posted& posted) {
  const std::string lost = posted.peer == Communicator::kAnySource ? loss_of_any() : group_->loss_of(posted.peer, true);
  if (!lost.empty()) {
    progress();  // what the peer had sent before its end counts
  }
  if (posted.ended) {
    return;
  }
  try {
    group_->check_usable([this](const Posted& transfer) { return describe(transfer); }, posted);
    if (!lost.empty()) {
      const bool left = posted.peer != Communicator::kAnySource &&
                        group_->control(posted.peer).state.load(std::memory_order_acquire) == RankState::kLeft;
      const std::string text = describe(posted) + ": " + lost;
      if (left) {
        throw PeerLeft(text);
      }
      throw PeerLost(text);
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
    posted.message->state.store(MessageState::kFree, std::memory_order_release);
  }
}

std::string PointToPoint::describe(const Posted& posted) const {
  const std::string peer = posted.peer == Communicator::kAnySource ? "any rank" : "rank " + std::to_string(posted.peer);
  return std::string(posted.is_send ? "send" : "receive") + " of " + std::to_string(posted.count) + " " +
         accelerate_cpp::name(posted.dtype) + (posted.is_send ? " to " : " from ") + peer + " with tag " +
         std::to_string(posted.tag) + " on rank " + std::to_string(group_->rank()) +
         (posted.location.empty() ? "" : " at " + posted.location);
}

}  // namespace accelerate_cpp::comm
