// Sends and receives on top of ports, which carry messages between known ranks but cannot match them: by (source, tag)
// in the order of posting, from any source across several ports, with sizes and dtypes compared.
//
// A message is an envelope, which holds its description and, up to `inline_bytes`, its data. More data follows as a
// second message under a slot that only this message uses. The receiver posts a receive for the envelopes of a rank
// while some receive could take a message from it, and one for the data once it knows where it belongs; so only
// envelopes are received unasked. Any thread that waits or polls makes progress on all transfers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/comm/call.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

class MessageMatcher : public std::enable_shared_from_this<MessageMatcher> {
 public:
  // Of envelopes; the data of a message has another one.
  static constexpr std::uint32_t kEnvelopeSlot = 0;

  // A way to another rank. Messages with the same slot arrive in order. Slots are below 2^30.
  class Port {
   public:
    virtual ~Port() = default;
    // Complete once `data` may be reused.
    virtual std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint32_t slot,
                                           const Call& call) = 0;
    // `data` has the size of the message.
    virtual std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint32_t slot, const Call& call) = 0;
  };

  // ports[r] leads to rank r; that of this rank is null.
  MessageMatcher(int rank, std::vector<std::shared_ptr<Port>> ports, std::size_t inline_bytes, WaitHooks hooks = {});
  ~MessageMatcher();
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call);
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call);

  // Fails all posted receives that are not matched yet. Transfers keep this object alive; it does not keep its owner
  // alive.
  void close();

 private:
  class SentMessage;
  class ReceivedMessage;
  struct Envelope;
  using ReceivePointer = std::shared_ptr<ReceivedMessage>;
  using Lock = std::unique_lock<std::mutex>;

  // A message whose envelope has arrived, but for which no receive was posted.
  struct Unexpected {
    int source;
    std::vector<std::byte> envelope;
  };

  // The receive for the next envelope of one rank.
  struct Inbox {
    std::vector<std::byte> envelope;
    std::shared_ptr<Transfer> transfer;  // null: not posted
    bool waited_for = false;             // by a thread that does so without the mutex
    std::exception_ptr lost;             // why no further envelope can come
  };

  std::size_t envelope_bytes() const;
  // All of these are called with the mutex held.
  bool wanted_from(int source) const;
  void post_inbox(int source);
  void progress();
  void take_envelope(int source, Inbox& inbox);
  // Whether a receive from any rank may go on after the loss: this one left in good order, and others are there.
  bool others_may_send(const Inbox& inbox) const;
  void lose(int source, Inbox& inbox);
  void bind(ReceivedMessage& receive, int source, const std::vector<std::byte>& envelope);
  void drain(int source, const Envelope& envelope);
  bool has_ended(ReceivedMessage& receive);
  Inbox* inbox_to_wait_for(const ReceivedMessage& receive, int turn);

  void wait(ReceivedMessage& receive, const Deadline& deadline);
  void wait_for_envelope(Lock& lock, Inbox* inbox, std::chrono::milliseconds slice);

  const int rank_;
  const WaitHooks hooks_;
  const std::vector<std::shared_ptr<Port>> ports_;
  const std::size_t inline_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;  // an inbox was emptied, lost, or is no longer waited for
  bool closed_ = false;
  std::map<int, Inbox> inboxes_;
  std::list<ReceivePointer> posted_;  // not matched, in the order of posting
  std::list<Unexpected> unexpected_;  // in the order of arrival
  std::vector<std::uint32_t> slots_;  // the next slot for data, per destination
  std::list<std::shared_ptr<SentMessage>> sent_;
  // Receives for the data of refused messages, which are thrown away.
  std::list<std::pair<std::vector<std::byte>, std::shared_ptr<Transfer>>> drained_;
};

// A Communicator as a port: ranks[r] is the communicator's number for rank r, or negative.
std::shared_ptr<MessageMatcher::Port> make_port(std::shared_ptr<Communicator> communicator, std::vector<int> ranks);

}  // namespace accelerate_cpp::comm
