#include "core/comm/shm/outgoing_messages.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kChunkBytes = 256 * 1024;  // copied between two signs of progress

}  // namespace

OutgoingMessages::OutgoingMessages(std::shared_ptr<Group> group, std::size_t pool_bytes)
    : group_(std::move(group)),
      pool_(group_->arena(), pool_bytes),
      destinations_(static_cast<std::size_t>(group_->size())) {}

void OutgoingMessages::open_outbox() {
  const int size = group_->size();
  const Arena::Block block = group_->arena()->create(outbox_bytes(size));
  std::byte* const base = block.segment->data();
  for (int rank = 0; rank < size; ++rank) {
    destination(rank).pages.push_back({&mailbox(base, rank), block.id, inline_offset(size, rank, 0), base});
  }
  group_->own().outbox.store(block.id + 1, std::memory_order_release);
}

OutgoingMessages::Page& OutgoingMessages::add_page(Destination& destination) {
  const Arena::Block block = group_->arena()->create(outbox_bytes(1));
  std::byte* const base = block.segment->data();
  destination.pages.back().box->next.store(block.id + 1, std::memory_order_release);
  return destination.pages.emplace_back(Page{&mailbox(base, 0), block.id, inline_offset(1, 0, 0), base});
}

std::optional<OutgoingMessages::Place> OutgoingMessages::place_at(const Page& page, std::size_t slot,
                                                                  std::size_t size_bytes, bool beyond_limits) {
  Message& message = page.box->messages[slot];
  if (size_bytes > kInlineBytes) {
    std::byte* const room = pool_.take(message, size_bytes, beyond_limits);
    return room == nullptr ? std::nullopt : std::optional(Place{&message, room});
  }
  message.segment = page.segment;
  message.offset_bytes = page.inline_begin + slot * kInlineBytes;
  return Place{&message, page.base + message.offset_bytes};
}

std::optional<OutgoingMessages::Place> OutgoingMessages::room_for(Destination& destination, std::size_t size_bytes,
                                                                  bool beyond_limits) {
  const auto is_free = [](const Message& message) {
    return message.state.load(std::memory_order_acquire) == MessageState::kFree;
  };
  for (const Page& page : destination.pages) {
    const auto* const found = std::find_if(std::begin(page.box->messages), std::end(page.box->messages), is_free);
    if (found != std::end(page.box->messages)) {
      return place_at(page, static_cast<std::size_t>(found - page.box->messages), size_bytes, beyond_limits);
    }
  }
  if (!beyond_limits && destination.pages.size() * kMessages >= kEagerMessages) {
    return std::nullopt;
  }
  return place_at(add_page(destination), 0, size_bytes, beyond_limits);
}

std::optional<OutgoingMessages::Place> OutgoingMessages::find_place(int rank, std::size_t size_bytes,
                                                                    bool beyond_limits) {
  Destination& destination = this->destination(rank);
  if (destination.pages.empty()) {
    open_outbox();
  }
  pool_.reclaim();  // before a description that still counts as the user of a block is used again
  // A message in memory of which the destination has not been told would be lost to it while this rank does other
  // things, and for good when it leaves. Memory that was made in vain is idle.
  const auto is_told = [&] { return beyond_limits || group_->arena()->has_told(rank); };
  if (!is_told()) {
    return std::nullopt;
  }
  const std::optional<Place> place = room_for(destination, size_bytes, beyond_limits);
  return is_told() ? place : std::nullopt;
}

void OutgoingMessages::post(const Place& place, ConstMemoryView data, int rank, std::uint64_t tag) {
  Destination& destination = this->destination(rank);
  Message& message = *place.message;
  message.tag = tag;
  message.count = data.count;
  message.dtype = data.dtype;
  message.order = destination.posted++;
  message.written.store(0, std::memory_order_relaxed);
  message.state.store(MessageState::kPosted, std::memory_order_release);
  destination.pages.front().box->posted.store(destination.posted, std::memory_order_release);
  EventWord& doorbell = group_->control(rank).doorbell;
  const std::size_t size_bytes = data.size_bytes();
  std::size_t begin = 0;
  do {
    const std::size_t length = std::min(kChunkBytes, size_bytes - begin);
    if (length > 0) {
      std::memcpy(place.room + begin, data.bytes() + begin, length);
    }
    begin += length;
    message.written.store(begin, std::memory_order_release);
    doorbell.notify();
  } while (begin < size_bytes);
}

bool OutgoingMessages::take_wish(int rank, std::uint64_t tag) {
  Destination& destination = this->destination(rank);
  const std::uint64_t bit = tag_bit(tag);
  if (destination.pages.empty()) {
    return false;
  }
  Mailbox& box = *destination.pages.front().box;
  return (box.wanted.load(std::memory_order_acquire) & bit) != 0 && (box.wanted.fetch_and(~bit) & bit) != 0;
}

void OutgoingMessages::set_held_back(int rank, bool held_back) {
  Destination& destination = this->destination(rank);
  if (destination.pages.empty()) {
    return;
  }
  Mailbox& box = *destination.pages.front().box;
  if ((box.held_back.load(std::memory_order_relaxed) != 0) == held_back) {
    return;
  }
  box.wanted.store(0, std::memory_order_relaxed);  // what was wanted the last time
  box.held_back.store(held_back ? 1 : 0, std::memory_order_seq_cst);
  if (held_back) {
    group_->control(rank).doorbell.notify();
  }
}

std::optional<std::string> OutgoingMessages::take_refusals(int rank) {
  Destination& destination = this->destination(rank);
  if (destination.pages.empty()) {
    return std::nullopt;
  }
  const std::uint32_t refused = destination.pages.front().box->refused.load(std::memory_order_acquire);
  if (refused == destination.refused) {
    return std::nullopt;
  }
  std::string text;
  for (const Page& page : destination.pages) {
    for (Message& message : page.box->messages) {
      if (message.state.load(std::memory_order_acquire) == MessageState::kRefused) {
        text += std::string(text.empty() ? "" : "; ") + group_->hooks().name_of(group_->rank()) + " sent " +
                std::to_string(message.count) + " " + accelerate_cpp::name(message.dtype) + " with tag " +
                std::to_string(message.tag) + ", but " + group_->hooks().name_of(rank) + " received " +
                std::to_string(message.expected_count) + " " + accelerate_cpp::name(message.expected_dtype);
        pool_.reclaim();
        message.state.store(MessageState::kFree, std::memory_order_relaxed);
        ++destination.refused;
      }
    }
  }
  return text.empty() ? std::nullopt : std::optional(text);
}

}  // namespace accelerate_cpp::comm
