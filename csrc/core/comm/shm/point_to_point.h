// Sends and receives between the ranks of a Group.
//
// A send copies its data into shared memory of this rank (the outbox, or a block of a pool) and is then complete: two
// ranks may both send first. It stays pending while all message slots for the destination are in use, or the pool has
// reached its limit. A receive takes the oldest message from its source that has its tag and copies the data out, while
// the sender may still be copying in. Transfers are moved on by whoever waits or polls, in any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/comm/call.h"
#include "core/comm/communicator.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/message_pool.h"
#include "core/comm/shm/outbox.h"

namespace accelerate_cpp::comm {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  // The pool holds at most so much; a single message may be larger when nothing else is on its way.
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
  // Moves everything on as far as it goes without waiting. Called with the mutex held.
  void progress();
  bool try_send(Posted& send);
  bool try_receive(Posted& receive);
  bool take_message(Posted& receive, int source);
  bool copy_out(Posted& receive);
  Mailbox* mailbox_of(int source);
  std::byte* own_outbox();
  // Where the data of the message in `slot` go; null while the pool is full.
  std::byte* find_room(Message& message, int destination, std::size_t slot, std::size_t size_bytes);
  void look_for_messages();

  bool poll(const PostedPointer& posted);
  void wait(const PostedPointer& posted, const Deadline& deadline);
  // check() when the last one is a while ago; returns whether it was done.
  bool check_now_and_then(Posted& posted);
  // As Group::loss_of, for a message from whomever: ranks that left in good order count once no other is there.
  std::string loss_of_any();
  // Fails the transfer when its deadline has passed or its peer is gone.
  void check(Posted& posted);
  // The report that is due when the wait has become long; else empty.
  std::string report_of_wait(Posted& posted) const;
  void fail(Posted& posted, std::exception_ptr error);
  // As fail(), and nobody tries it again. Not for use while progress() goes through the list.
  void end(Posted& posted, std::exception_ptr error);
  std::string describe(const Posted& posted) const;

  const std::shared_ptr<Group> group_;
  MessagePool pool_;
  std::mutex mutex_;
  std::list<PostedPointer> posted_;  // not ended, in the order of posting
  std::shared_ptr<Segment> outbox_;
  std::uint32_t outbox_id_ = 0;
  std::vector<std::uint64_t> sent_;     // messages posted, per destination
  std::vector<std::uint64_t> taken_;    // messages taken, per source
  std::vector<std::uint64_t> visible_;  // messages posted, per source, when progress() began
  std::vector<Mailbox*> mailboxes_;     // of each peer, for this rank; null until it has an outbox
  std::vector<std::shared_ptr<Segment>> peer_outboxes_;
};

}  // namespace accelerate_cpp::comm
