#include "core/comm/shm/incoming_messages.h"

#include <algorithm>
#include <string>
#include <utility>

namespace accelerate_cpp::comm {

IncomingMessages::IncomingMessages(std::shared_ptr<Group> group)
    : group_(std::move(group)), sources_(static_cast<std::size_t>(group_->size())) {}

bool IncomingMessages::open_page(Source& source, int rank) {
  const bool first = source.pages.empty();
  const std::uint32_t number = first ? group_->control(rank).outbox.load(std::memory_order_acquire)
                                     : source.pages.back()->next.load(std::memory_order_acquire);
  std::shared_ptr<Segment> segment = number == 0 ? nullptr : group_->arena()->of_peer(rank, number - 1);
  if (!segment) {
    return false;
  }
  require_bytes(*segment, 0, outbox_bytes(first ? group_->size() : 1), group_->hooks().number_of(rank));
  if (std::find(source.segments.begin(), source.segments.end(), segment) != source.segments.end()) {
    throw damaged_memory(group_->hooks().name_of(rank) + " names segment " + std::to_string(number - 1) +
                         " twice as a page of its messages, expected another one");
  }
  source.pages.push_back(&mailbox(segment->data(), first ? group_->rank() : 0));
  source.segments.push_back(std::move(segment));
  return true;
}

bool IncomingMessages::open_pages(Source& source, int rank) {
  if (source.pages.empty() && !open_page(source, rank)) {
    return false;
  }
  while (source.pages.back()->next.load(std::memory_order_acquire) != 0) {
    if (!open_page(source, rank)) {
      return false;
    }
  }
  return true;
}

void IncomingMessages::look() {
  for (int rank = 0; rank < group_->size(); ++rank) {
    Source& source = this->source(rank);
    if (rank == group_->rank() || (source.pages.empty() && !open_page(source, rank))) {
      continue;
    }
    // A message on a page that has not arrived could be overtaken by later ones, so none of the new ones counts yet.
    const std::uint64_t posted = source.pages.front()->posted.load(std::memory_order_acquire);
    if (posted != source.visible && open_pages(source, rank)) {
      source.visible = posted;
    }
  }
}

Message* IncomingMessages::take(int rank, std::uint64_t tag) {
  Source& source = this->source(rank);
  if (source.visible <= source.taken) {
    return nullptr;
  }
  Message* oldest = nullptr;
  for (Mailbox* const page : source.pages) {
    for (Message& message : page->messages) {
      if (message.state.load(std::memory_order_acquire) == MessageState::kPosted && message.order < source.visible &&
          message.tag == tag && (oldest == nullptr || message.order < oldest->order)) {
        oldest = &message;
      }
    }
  }
  if (oldest != nullptr) {
    oldest->state.store(MessageState::kTaken, std::memory_order_relaxed);
    ++source.taken;
  }
  return oldest;
}

void IncomingMessages::release(Message& message, int source) {
  message.state.store(MessageState::kFree, std::memory_order_release);
  group_->control(source).doorbell.notify();
}

void IncomingMessages::refuse(Message& message, int source, std::size_t count, DType dtype) {
  message.expected_count = count;
  message.expected_dtype = dtype;
  message.state.store(MessageState::kRefused, std::memory_order_release);
  this->source(source).pages.front()->refused.fetch_add(1, std::memory_order_release);
  group_->control(source).doorbell.notify();
}

void IncomingMessages::wish(int rank, std::uint64_t tag_bits) {
  if (!held_back(rank)) {
    return;
  }
  Mailbox& box = *source(rank).pages.front();
  const std::uint64_t before = box.wanted.exchange(tag_bits, std::memory_order_seq_cst);
  if ((tag_bits & ~before) != 0) {
    group_->control(rank).doorbell.notify();
  }
}

bool IncomingMessages::held_back(int rank) const {
  const Source& source = sources_[static_cast<std::size_t>(rank)];
  return !source.pages.empty() && source.pages.front()->held_back.load(std::memory_order_seq_cst) != 0;
}

}  // namespace accelerate_cpp::comm
