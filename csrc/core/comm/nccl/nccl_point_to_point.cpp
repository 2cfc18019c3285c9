#include "core/comm/nccl/nccl_point_to_point.h"

#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/nccl/patience.h"

namespace accelerate_cpp::comm {
namespace {

class NcclTransfer final : public Transfer {
 public:
  NcclTransfer(std::shared_ptr<NcclPointToPoint> owner, SharedPosting posting, std::string title)
      : owner_(std::move(owner)), posting_(std::move(posting)), title_(std::move(title)) {}

  bool poll() noexcept override {
    if (!ended()) {
      owner_->progress();
    }
    return ended();
  }

  void wait(Deadline deadline) override {
    Patience patience(deadline, owner_->group().options().hooks);
    while (!poll()) {
      owner_->group().check_not_forked(title_);
      if (patience.expired()) {
        throw Timeout(title_ + " had not ended after " + std::to_string(deadline.waited().count()) +
                      " ms. It stays posted");
      }
      if (patience.warn_now()) {
        owner_->group().options().hooks.warn(title_ + " has been waiting for " +
                                             std::to_string(patience.waited().count()) + " ms and goes on waiting");
      }
      patience.pause();
    }
    if (posting_->error != nullptr) {
      std::rethrow_exception(posting_->error);
    }
  }

  int source() const override { return posting_->source; }

 private:
  bool ended() const { return posting_->ended.load(std::memory_order_acquire); }

  std::shared_ptr<NcclPointToPoint> owner_;
  SharedPosting posting_;
  std::string title_;
};

std::string between(const NcclGroup& group, const char* preposition, int peer) {
  return std::string(" ") + preposition + " rank " + std::to_string(peer) + " on " + group.place();
}

void check_peer(const char* operation, int peer, const NcclGroup& group) {
  if (peer < 0 || peer >= group.size() || peer == group.rank()) {
    throw InvalidArgument(std::string(operation) + ": rank " + std::to_string(peer) + " is not another rank of this " +
                          "group, seen from " + group.place());
  }
}

}  // namespace

NcclPointToPoint::NcclPointToPoint(std::shared_ptr<NcclGroup> group) : group_(std::move(group)) {}

std::shared_ptr<Transfer> NcclPointToPoint::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                                 const Call& call) {
  check_peer("send", destination, *group_);
  const MemoryView operand{const_cast<void*>(data.data), data.count, data.dtype};  // only read, see Posting
  return post<OutgoingChannel>(outgoing_, destination, group_->rank(), operand, tag, call,
                               "send" + between(*group_, "to", destination));
}

std::shared_ptr<Transfer> NcclPointToPoint::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  if (source == Communicator::kAnySource) {
    throw InvalidArgument(
        "receive: NCCL cannot receive from any source, since a receive keeps the GPU waiting for one rank. Name the "
        "source, or use a group of another backend");
  }
  check_peer("receive", source, *group_);
  return post<IncomingChannel>(incoming_, source, source, data, tag, call,
                               "receive" + between(*group_, "from", source));
}

template <class Channel>
std::shared_ptr<Transfer> NcclPointToPoint::post(Channels& channels, int peer, int source, MemoryView data,
                                                 std::uint64_t tag, const Call& call, const std::string& title) {
  SharedPosting posting;
  {
    const std::lock_guard lock(mutex_);
    group_->check_usable(title);
    const DeviceGuard guard(*group_->context().device);
    posting = std::make_shared<Posting>(*group_, data, source, tag, call);
    std::unique_ptr<NcclChannel>& channel = channels[peer];
    if (channel == nullptr) {
      channel = std::make_unique<Channel>(*group_, peer);
    }
    channel->post(posting);
    ++pending_;
  }
  progress();
  return std::make_shared<NcclTransfer>(shared_from_this(), posting, title + " (" + posting->describe() + ")");
}

void NcclPointToPoint::progress() noexcept {
  if (pending_ == 0 || group_->context().device->in_forked_child()) {
    return;
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return;
  }
  const DeviceGuard guard(*group_->context().device);
  try {
    advance();
  } catch (const std::exception& error) {
    group_->fail({false, 0, error.what()});
    end_all(std::current_exception());
  } catch (...) {
    group_->fail({false, 0, "a transfer on " + group_->place() + " was interrupted"});
    end_all(std::current_exception());
  }
}

void NcclPointToPoint::advance() {
  const auto now = std::chrono::steady_clock::now();
  if (now >= next_look_) {
    next_look_ = now + group_->options().stall_after;
    if (const auto told = group_->board().failure(); told.has_value()) {
      group_->fail(*told, false);
    }
  }
  if (const auto failure = group_->failure(); failure.has_value()) {
    end_all(std::make_exception_ptr(PeerLost("a transfer on " + group_->place() + ": " + failure->text)));
    return;
  }
  std::size_t pending = 0;
  for (NcclChannel* const channel : channels()) {
    channel->advance();
    for (const SharedPosting& posting : channel->pending()) {
      if (posting->deadline.expired()) {
        expire(*posting, channel->peer());
        return;
      }
      ++pending;
    }
  }
  pending_ = pending;
}

void NcclPointToPoint::expire(Posting& posting, int peer) {
  const std::string text = (posting.source == group_->rank() ? "send" + between(*group_, "to", peer)
                                                             : "receive" + between(*group_, "from", peer)) +
                           " (" + posting.describe() + ") had not ended after " +
                           std::to_string(posting.deadline.waited().count()) + " ms. " +
                           (group_->board().last_operation_of(peer).has_value()
                                ? "The other side has left the group"
                                : "Either the other side is late, which a longer timeout allows for, or it is lost");
  group_->fail({false, 0, text});
  abort_all();
  posting.end(std::make_exception_ptr(Timeout(text)));
  end_all(std::make_exception_ptr(PeerLost(text)));
}

std::vector<NcclChannel*> NcclPointToPoint::channels() const {
  std::vector<NcclChannel*> all;
  for (const Channels* const some : {&outgoing_, &incoming_}) {
    for (const auto& [peer, channel] : *some) {
      all.push_back(channel.get());
    }
  }
  return all;
}

void NcclPointToPoint::abort_all() noexcept {
  for (NcclChannel* const channel : channels()) {
    channel->abort();
  }
}

// The operands are their owner's again once a transfer has ended, so the GPU is stopped first.
void NcclPointToPoint::end_all(const std::exception_ptr& error) noexcept {
  abort_all();
  for (NcclChannel* const channel : channels()) {
    for (const SharedPosting& posting : channel->pending()) {
      posting->end(error);
    }
  }
  outgoing_.clear();
  incoming_.clear();
  pending_ = 0;
}

void NcclPointToPoint::close() noexcept {
  if (group_->context().device->in_forked_child()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const DeviceGuard guard(*group_->context().device);
  if (pending_ > 0) {
    const std::string text =
        "a transfer on " + group_->place() + ": its communicator was destroyed before it had ended";
    group_->fail({false, 0, text});
    end_all(std::make_exception_ptr(PeerLost(text)));
    return;
  }
  for (NcclChannel* const channel : channels()) {
    channel->retire();
  }
  outgoing_.clear();
  incoming_.clear();
}

}  // namespace accelerate_cpp::comm
