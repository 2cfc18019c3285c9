// Sends and receives between the ranks of a Group.
//
// A send copies its data into shared memory of this rank (the outbox, or a block of a pool) and is then complete: two
// ranks may both send first. Once a destination has OutgoingMessages::kEagerMessages to receive, or the pool holds
// kPoolBytes, or the destination cannot be told of more memory (some 270 blocks that it has not looked at, of larger
// messages for any rank), a send stays pending until there is room again, so that a fast sender does not fill the
// memory of the host; but it gets memory at once when its receive is posted already, and when its destination, blocked
// in a call, waits for this rank. A receive takes the oldest message from its source that has its tag and copies the
// data out, while the sender may still be copying in; a message that does not fit it raises MismatchedCollective there
// and, in the next transfer between the two, at the sender. Any thread that waits or polls makes progress on all
// transfers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/call.h"
#include "core/comm/communicator.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/incoming_messages.h"
#include "core/comm/shm/outgoing_messages.h"
#include "core/comm/shm/wait_graph.h"
#include "core/comm/transfer_text.h"

namespace accelerate_cpp::comm {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  // The limit of the pool; a single message may be larger if nothing else is on its way.
  static constexpr std::size_t kPoolBytes = std::size_t{256} << 20;

  explicit PointToPoint(std::shared_ptr<Group> group, std::size_t pool_bytes = kPoolBytes);

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call);
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call);

 private:
  class Handle;

  // One posted transfer.
  struct Posted {
    bool is_send;
    std::byte* data;  // only read when sending
    std::size_t size_bytes;
    std::size_t count;
    DType dtype;
    int peer;  // or Communicator::kAnySource
    std::uint64_t tag;
    Deadline deadline;
    std::string location;

    bool ended = false;
    std::exception_ptr error;
    int source = -1;
    Message* message = nullptr;  // once a receive has taken one
    std::size_t copied_bytes = 0;
    std::chrono::steady_clock::time_point last_check{};
    bool warned = false;
  };
  using PostedPointer = std::shared_ptr<Posted>;

  std::shared_ptr<Transfer> post(const PostedPointer& posted);
  // Makes as much progress as possible without waiting. Called with the mutex held.
  void progress();
  // Ends the oldest transfer with each peer that has refused a message.
  void pass_on_refusals();
  bool try_send(Posted& send);
  // Whether a send that finds no room gets some anyway.
  bool may_exceed_limits(const Posted& send);
  bool try_receive(Posted& receive);
  bool take_message(Posted& receive, int source);
  bool copy_out(Posted& receive);
  // Notes what a receive without a message wishes for.
  void wish(const Posted& receive);
  // What the wait for the transfer waits for, as RankControl::awaited_in_transfer says it.
  std::uint32_t awaited(const Posted& posted) const;
  // Rings the doorbells of peers that hold back messages which this wait may need.
  void tell_of_wait(const Posted& posted);

  bool poll(const PostedPointer& posted);
  void wait(const PostedPointer& posted, const Deadline& deadline);
  // Calls check() if the last one was a while ago; returns whether it did.
  bool check_now_and_then(Posted& posted);
  // As Group::loss_of, for a message from any rank: ranks that left in good order count only once no other is there.
  Group::Loss loss_of_any();
  // Fails the transfer when its deadline has passed or its peer is gone.
  void check(Posted& posted);
  // The report that is due when the wait has become long; else empty.
  std::string report_of_wait(Posted& posted) const;
  void fail(Posted& posted, std::exception_ptr error);
  // As fail(), and removes it from the list. Not for use while progress() iterates over the list.
  void end(Posted& posted, std::exception_ptr error);
  TransferText text_of(const Posted& posted) const;
  std::string describe(const Posted& posted) const { return text_of(posted).describe(); }

  const std::shared_ptr<Group> group_;
  OutgoingMessages outgoing_;
  IncomingMessages incoming_;
  PublishedWaits waits_;
  std::mutex mutex_;
  std::list<PostedPointer> posted_;                    // not ended, in the order of posting
  std::vector<std::vector<std::uint64_t>> held_back_;  // tags, per destination, as of this progress()
  std::vector<std::uint64_t> wishes_;                  // tag bits, per source, as of this progress()
  std::vector<std::optional<std::string>> refused_;    // per destination: what no transfer has raised yet
};

}  // namespace accelerate_cpp::comm
