// The messages of this rank that have not been received yet: its outbox, as outbox.h lays it out, and the blocks that
// hold the data of large ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/memory_view.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/message_pool.h"
#include "core/comm/shm/outbox.h"

namespace accelerate_cpp::comm {

// Not thread-safe.
class OutgoingMessages {
 public:
  // The number of messages for one destination that are sent eagerly. Each message that a receiver skips takes it some
  // time.
  static constexpr std::size_t kEagerMessages = 1024;

  // `pool_bytes` of large messages are sent eagerly.
  OutgoingMessages(std::shared_ptr<Group> group, std::size_t pool_bytes);

  // A free description of a message for `destination`, and room for its data.
  struct Place {
    Message* message;
    std::byte* room;
  };

  // Empty while the limit of eager messages is reached, or the destination cannot be told of the memory that the
  // message takes, unless `beyond_limits`. Throws SystemFailure when there is not enough memory.
  std::optional<Place> find_place(int destination, std::size_t size_bytes, bool beyond_limits);

  // Posts the message at `place` and copies its data, which the receiver may take meanwhile.
  void post(const Place& place, ConstMemoryView data, int destination, std::uint64_t tag);

  // Whether the destination waits for a message with this tag and finds none. Clears the wish: the destination repeats
  // it if it still waits after the message has come.
  bool take_wish(int destination, std::uint64_t tag);

  // Tells the destination whether messages for it wait for room.
  void set_held_back(int destination, bool held_back);

  // Whether messages of this rank for `destination` have been refused; describes them and frees their places.
  std::optional<std::string> take_refusals(int destination);

 private:
  // The descriptions in one segment for one destination.
  struct Page {
    Mailbox* box;
    std::uint32_t segment;
    std::size_t inline_begin;  // of the data of small messages, in the segment
    std::byte* base;           // of the segment
  };
  struct Destination {
    std::vector<Page> pages;
    std::uint64_t posted = 0;
    std::uint32_t refused = 0;  // as far as take_refusals() has seen
  };

  Destination& destination(int rank) { return destinations_[static_cast<std::size_t>(rank)]; }
  void open_outbox();
  Page& add_page(Destination& destination);
  std::optional<Place> room_for(Destination& destination, std::size_t size_bytes, bool beyond_limits);
  std::optional<Place> place_at(const Page& page, std::size_t slot, std::size_t size_bytes, bool beyond_limits);

  const std::shared_ptr<Group> group_;
  MessagePool pool_;
  std::vector<Destination> destinations_;
};

}  // namespace accelerate_cpp::comm
