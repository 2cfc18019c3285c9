// The messages that the other ranks have posted for this one: its part of their outboxes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/shm/group.h"
#include "core/comm/shm/outbox.h"

namespace accelerate_cpp::comm {

// Not thread-safe.
class IncomingMessages {
 public:
  explicit IncomingMessages(std::shared_ptr<Group> group);

  // Notes what has been posted. take() only sees messages that look() has noted: if one that arrives in between were
  // visible, an earlier receive could miss it and a later one take it, out of order.
  void look();

  // Takes the oldest message of `source` with `tag`; null when there is none.
  Message* take(int source, std::uint64_t tag);

  // Call this once the data of the message have been copied.
  void release(Message& message, int source);

  // The message does not fit a receive of `count` values of `dtype`. Tells its sender.
  void refuse(Message& message, int source, std::size_t count, DType dtype);

  // The tags (bits as of tag_bit) of the receives that found no message of `source`; a sender that holds messages back
  // then makes room for these.
  void wish(int source, std::uint64_t tag_bits);

  // Whether `source` has messages for this rank and no room for them.
  bool held_back(int source) const;

 private:
  struct Source {
    std::vector<std::shared_ptr<Segment>> segments;
    std::vector<Mailbox*> pages;
    std::uint64_t taken = 0;
    std::uint64_t visible = 0;  // messages posted, when look() was last called
  };

  Source& source(int rank) { return sources_[static_cast<std::size_t>(rank)]; }
  // The next page of the source; false while there is none, or its segment has not arrived.
  bool open_page(Source& source, int rank);
  // Opens all pages that there are; false while some have not arrived.
  bool open_pages(Source& source, int rank);

  const std::shared_ptr<Group> group_;
  std::vector<Source> sources_;
};

}  // namespace accelerate_cpp::comm
