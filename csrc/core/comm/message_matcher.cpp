#include "core/comm/message_matcher.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/comm/arguments.h"
#include "core/comm/transfer_text.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::uint32_t kLastSlot = (std::uint32_t{1} << 30) - 1;
constexpr std::chrono::milliseconds kSlice{50};
constexpr std::chrono::milliseconds kSliceOfSeveral{1};

MemoryView bytes_of(std::vector<std::byte>& bytes) {
  return {bytes.data(), bytes.size(), DType::kUInt8};
}

class CommunicatorPort final : public MessageMatcher::Port {
 public:
  CommunicatorPort(std::shared_ptr<Communicator> communicator, std::vector<int> ranks)
      : communicator_(std::move(communicator)), ranks_(std::move(ranks)) {}

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint32_t slot, const Call& call) override {
    return communicator_->send(data, ranks_[static_cast<std::size_t>(destination)], slot, call);
  }
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint32_t slot, const Call& call) override {
    return communicator_->receive(data, ranks_[static_cast<std::size_t>(source)], slot, call);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::vector<int> ranks_;
};

}  // namespace

struct MessageMatcher::Envelope {
  std::uint64_t tag;
  std::uint64_t count;
  std::uint32_t slot;  // of the data; kEnvelopeSlot when it follows in the envelope
  DType dtype;

  explicit Envelope(const std::vector<std::byte>& bytes) { std::memcpy(this, bytes.data(), sizeof(*this)); }
  Envelope(std::uint64_t tag_, ConstMemoryView data, std::uint32_t slot_)
      : tag(tag_), count(data.count), slot(slot_), dtype(data.dtype) {}
};

class MessageMatcher::SentMessage final : public Transfer {
 public:
  std::vector<std::byte> envelope;
  std::vector<std::shared_ptr<Transfer>> parts;

  bool poll() noexcept override {
    return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part->poll(); });
  }
  void wait(Deadline deadline) override {
    for (const auto& part : parts) {
      part->wait(deadline);
    }
  }
  int source() const override { return -1; }
};

class MessageMatcher::ReceivedMessage final : public Transfer {
 public:
  ReceivedMessage(std::shared_ptr<MessageMatcher> matcher_, MemoryView data_, int wanted_, std::uint64_t tag_,
                  const Call& call)
      : matcher(std::move(matcher_)),
        data(data_),
        wanted(wanted_),
        tag(tag_),
        deadline(call.deadline),
        location(call.location) {}

  bool poll() noexcept override {
    const Lock lock(matcher->mutex_);
    matcher->progress();
    return matcher->has_ended(*this);
  }
  void wait(Deadline until) override { matcher->wait(*this, until); }
  int source() const override {
    const Lock lock(matcher->mutex_);
    return found;
  }

  bool takes_from(int rank) const { return wanted == Communicator::kAnySource || wanted == rank; }
  TransferText text() const {
    const WaitHooks& names = matcher->hooks_;
    const int peer = wanted == Communicator::kAnySource ? wanted : names.number_of(wanted);
    return {false, data.count, data.dtype, peer, tag, names.number_of(matcher->rank_), location};
  }
  std::string describe() const { return text().describe(); }

  const std::shared_ptr<MessageMatcher> matcher;
  const MemoryView data;
  const int wanted;
  const std::uint64_t tag;
  const Deadline deadline;
  const std::string location;

  int found = -1;
  bool complete = false;
  std::exception_ptr error;
  std::shared_ptr<Transfer> payload;  // once matched with a message whose data did not fit into the envelope
};

MessageMatcher::MessageMatcher(int rank, std::vector<std::shared_ptr<Port>> ports, std::size_t inline_bytes,
                               WaitHooks hooks)
    : rank_(rank),
      hooks_(std::move(hooks)),
      ports_(std::move(ports)),
      inline_bytes_(inline_bytes),
      slots_(ports_.size(), kEnvelopeSlot) {}

MessageMatcher::~MessageMatcher() = default;

std::size_t MessageMatcher::envelope_bytes() const {
  return sizeof(Envelope) + inline_bytes_;
}

std::shared_ptr<Transfer> MessageMatcher::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                               const Call& call) {
  check_peer("send", destination, rank_, static_cast<int>(ports_.size()));
  Port& port = *ports_[static_cast<std::size_t>(destination)];
  const bool fits = data.size_bytes() <= inline_bytes_;
  auto message = std::make_shared<SentMessage>();
  message->envelope.resize(envelope_bytes());
  const Lock lock(mutex_);
  sent_.remove_if([](const auto& earlier) { return earlier->poll(); });
  std::uint32_t& slot = slots_[static_cast<std::size_t>(destination)];
  slot = fits ? slot : slot % kLastSlot + 1;
  const Envelope envelope(tag, data, fits ? kEnvelopeSlot : slot);
  std::memcpy(message->envelope.data(), &envelope, sizeof(envelope));
  if (fits && data.count > 0) {
    std::memcpy(message->envelope.data() + sizeof(envelope), data.data, data.size_bytes());
  }
  sent_.push_back(message);  // the port may keep a part that it does not send at once
  message->parts.push_back(port.send(bytes_of(message->envelope), destination, kEnvelopeSlot, call));
  if (!fits) {
    message->parts.push_back(port.send({data.data, data.size_bytes(), DType::kUInt8}, destination, slot, call));
  }
  return message;
}

std::shared_ptr<Transfer> MessageMatcher::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  const bool any = source == Communicator::kAnySource;
  if (!any) {
    check_peer("receive", source, rank_, static_cast<int>(ports_.size()));
  }
  auto message = std::make_shared<ReceivedMessage>(shared_from_this(), data, source, tag, call);
  const Lock lock(mutex_);
  if (closed_) {
    throw PeerLost(message->describe() + ": this communicator was closed");
  }
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& arrived) {
    return message->takes_from(arrived.source) && Envelope(arrived.envelope).tag == tag;
  });
  if (found != unexpected_.end()) {
    bind(*message, found->source, found->envelope);
    unexpected_.erase(found);
    return message;
  }
  posted_.push_back(message);
  const int last = static_cast<int>(ports_.size()) - 1;
  for (int peer = any ? 0 : source; peer <= (any ? last : source); ++peer) {
    if (peer != rank_) {
      post_inbox(peer);
    }
  }
  progress();
  return message;
}

void MessageMatcher::close() {
  const Lock lock(mutex_);
  closed_ = true;
  for (const ReceivePointer& receive : posted_) {
    receive->error =
        std::make_exception_ptr(PeerLost(receive->describe() + ": this communicator was closed before a message came"));
  }
  posted_.clear();
  changed_.notify_all();
}

bool MessageMatcher::wanted_from(int source) const {
  return std::any_of(posted_.begin(), posted_.end(),
                     [source](const ReceivePointer& receive) { return receive->takes_from(source); });
}

void MessageMatcher::post_inbox(int source) {
  Inbox& inbox = inboxes_[source];
  if (inbox.lost) {
    return lose(source, inbox);
  }
  if (!inbox.transfer) {
    inbox.envelope.resize(envelope_bytes());
    try {
      inbox.transfer = ports_[static_cast<std::size_t>(source)]->receive(bytes_of(inbox.envelope), source,
                                                                         kEnvelopeSlot, Deadline::never());
    } catch (...) {
      inbox.lost = std::current_exception();
      lose(source, inbox);
    }
  }
}

void MessageMatcher::progress() {
  for (auto& [source, inbox] : inboxes_) {
    while (inbox.transfer && !inbox.waited_for && inbox.transfer->poll()) {
      take_envelope(source, inbox);
    }
  }
  drained_.remove_if([](const auto& refused) { return refused.second->poll(); });
}

void MessageMatcher::take_envelope(int source, Inbox& inbox) {
  const std::shared_ptr<Transfer> transfer = std::move(inbox.transfer);
  inbox.transfer = nullptr;
  changed_.notify_all();
  try {
    transfer->wait(Deadline::never());
  } catch (...) {
    inbox.lost = std::current_exception();
    return lose(source, inbox);
  }
  const auto taker = std::find_if(posted_.begin(), posted_.end(), [&](const ReceivePointer& receive) {
    return receive->takes_from(source) && receive->tag == Envelope(inbox.envelope).tag;
  });
  if (taker == posted_.end()) {
    unexpected_.push_back({source, inbox.envelope});
  } else {
    bind(**taker, source, inbox.envelope);
    posted_.erase(taker);
  }
  if (wanted_from(source)) {
    post_inbox(source);
  }
}

bool MessageMatcher::others_may_send(const Inbox& inbox) const {
  try {
    std::rethrow_exception(inbox.lost);
  } catch (const PeerLeft&) {
    const auto is_lost = [](const auto& other) { return other.second.lost != nullptr; };
    const auto num_lost = std::count_if(inboxes_.begin(), inboxes_.end(), is_lost);
    return num_lost < static_cast<std::ptrdiff_t>(ports_.size()) - 1;
  } catch (...) {
    return false;
  }
}

void MessageMatcher::lose(int source, Inbox& inbox) {
  const bool only_this_one = others_may_send(inbox);
  for (auto entry = posted_.begin(); entry != posted_.end();) {
    const bool from_any = (*entry)->wanted == Communicator::kAnySource;
    if ((*entry)->takes_from(source) && !(from_any && only_this_one)) {
      (*entry)->error = inbox.lost;
      entry = posted_.erase(entry);
    } else {
      ++entry;
    }
  }
}

void MessageMatcher::bind(ReceivedMessage& receive, int source, const std::vector<std::byte>& bytes) {
  const Envelope envelope(bytes);
  receive.found = source;
  try {
    if (envelope.dtype != receive.data.dtype || envelope.count != receive.data.count) {
      drain(source, envelope);
      throw receive.text().mismatch(hooks_.number_of(source), envelope.count, envelope.dtype);
    }
    const std::size_t size_bytes = receive.data.size_bytes();
    if (envelope.slot != kEnvelopeSlot) {
      receive.payload = ports_[static_cast<std::size_t>(source)]->receive(
          {receive.data.data, size_bytes, DType::kUInt8}, source, envelope.slot, receive.deadline);
    } else if (size_bytes > 0) {
      std::memcpy(receive.data.data, bytes.data() + sizeof(Envelope), size_bytes);
    }
    receive.complete = !receive.payload;
  } catch (...) {
    receive.error = std::current_exception();
  }
}

void MessageMatcher::drain(int source, const Envelope& envelope) {
  if (envelope.slot != kEnvelopeSlot) {
    auto& refused = drained_.emplace_back();
    refused.first.resize(envelope.count * element_size(envelope.dtype));
    refused.second = ports_[static_cast<std::size_t>(source)]->receive(bytes_of(refused.first), source, envelope.slot,
                                                                       Deadline::never());
  }
}

bool MessageMatcher::has_ended(ReceivedMessage& receive) {
  if (!receive.complete && !receive.error && !receive.payload && receive.deadline.expired()) {
    receive.error = std::make_exception_ptr(
        Timeout(receive.describe() + ": nothing came for " + std::to_string(receive.deadline.waited().count()) +
                " ms. The sender may be stopped, slow, or in code that does not send this message"));
    posted_.remove_if([&receive](const ReceivePointer& entry) { return entry.get() == &receive; });
  }
  return receive.complete || receive.error || (receive.payload && receive.payload->poll());
}

MessageMatcher::Inbox* MessageMatcher::inbox_to_wait_for(const ReceivedMessage& receive, int turn) {
  std::vector<Inbox*> candidates;
  for (auto& [source, inbox] : inboxes_) {
    if (receive.takes_from(source) && inbox.transfer && !inbox.waited_for) {
      candidates.push_back(&inbox);
    }
  }
  return candidates.empty() ? nullptr : candidates[static_cast<std::size_t>(turn) % candidates.size()];
}

void MessageMatcher::wait_for_envelope(Lock& lock, Inbox* inbox, std::chrono::milliseconds slice) {
  if (inbox == nullptr) {  // another thread waits for it and tells
    changed_.wait_for(lock, slice);
    lock.unlock();
    hooks_.probe();
    lock.lock();
    return;
  }
  inbox->waited_for = true;
  const std::shared_ptr<Transfer> transfer = inbox->transfer;
  std::exception_ptr interruption;
  lock.unlock();
  try {
    transfer->wait(Deadline::after(slice));
  } catch (const Timeout&) {  // of this slice; if it is the transfer's own, progress() finds it
  } catch (...) {
    interruption = transfer->poll() ? nullptr : std::current_exception();
  }
  lock.lock();
  inbox->waited_for = false;
  changed_.notify_all();
  if (interruption) {
    std::rethrow_exception(interruption);
  }
}

void MessageMatcher::wait(ReceivedMessage& receive, const Deadline& deadline) {
  const bool several = receive.wanted == Communicator::kAnySource && ports_.size() > 2;
  Lock lock(mutex_);
  for (int turn = 0;; ++turn) {
    progress();
    if (has_ended(receive) || receive.payload) {
      break;
    }
    if (deadline.expired()) {
      throw Timeout(receive.describe() + " has not completed after " + std::to_string(deadline.waited().count()) +
                    " ms");
    }
    const auto left = std::min(deadline.remaining(), receive.deadline.remaining());
    const auto slice = std::min(several ? kSliceOfSeveral : kSlice, left + std::chrono::milliseconds(1));
    wait_for_envelope(lock, inbox_to_wait_for(receive, turn), slice);
  }
  if (receive.error) {
    std::rethrow_exception(receive.error);
  }
  const std::shared_ptr<Transfer> payload = receive.payload;
  lock.unlock();
  if (payload) {
    payload->wait(deadline);
  }
}

std::shared_ptr<MessageMatcher::Port> make_port(std::shared_ptr<Communicator> communicator, std::vector<int> ranks) {
  return std::make_shared<CommunicatorPort>(std::move(communicator), std::move(ranks));
}

}  // namespace accelerate_cpp::comm
