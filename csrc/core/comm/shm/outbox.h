// The messages that one rank has posted for the others: what lies in its outbox segment.
//
//   for each destination
//     0    posted      8   messages posted so far, on all pages
//     8    wanted      8   by the receiver: tags of messages that it waits for in vain (a bit for each, see tag_bit)
//     16   held_back   4   whether messages wait for room; only then does the receiver keep `wanted` up to date
//     20   next        4   1 + id of the segment with the next page of messages for this destination; 0: none
//     24   refused     4   by the receiver: messages that it has refused so far, on all pages
//     64   messages        kMessages descriptions of 64 bytes
//   then, for each destination and message, kInlineBytes for the data of a small message
//
// Further pages for a destination are segments laid out as an outbox with one destination, of which only `next` and
// what follows is used.
//
// The sender fills a free message and sets it to kPosted; the receiver that takes it sets it to kTaken and, when it has
// copied the data, back to kFree. If the message does not fit the receive, it is set to kRefused, and the sender frees
// it. Data of larger messages lie in other segments of the sender's arena.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace accelerate_cpp::comm {

enum class MessageState : std::uint32_t { kFree, kPosted, kTaken, kRefused };

struct alignas(64) Message {
  std::atomic<MessageState> state;
  std::uint32_t segment;  // where the data are
  std::uint64_t offset_bytes;
  std::uint64_t tag;
  std::uint64_t count;                 // elements
  std::uint64_t order;                 // among the messages for the same destination
  std::atomic<std::uint64_t> written;  // bytes of the data that are there
  DType dtype;
  DType expected_dtype;          // of the receive that has refused it
  std::uint64_t expected_count;  // likewise
};

inline constexpr std::size_t kMessages = 64;
inline constexpr std::size_t kInlineBytes = 4096;

struct Mailbox {
  std::atomic<std::uint64_t> posted;
  std::atomic<std::uint64_t> wanted;
  std::atomic<std::uint32_t> held_back;
  std::atomic<std::uint32_t> next;
  std::atomic<std::uint32_t> refused;
  Message messages[kMessages];
};

static_assert(sizeof(Message) == 64 && offsetof(Mailbox, messages) == 64, "see the layout above");

// The bit of Mailbox::wanted for a tag; tags may share one.
inline std::uint64_t tag_bit(std::uint64_t tag) {
  return std::uint64_t{1} << ((tag * 0x9e3779b97f4a7c15u) >> 58);
}

inline std::size_t outbox_bytes(int size) {
  return static_cast<std::size_t>(size) * (sizeof(Mailbox) + kMessages * kInlineBytes);
}

inline Mailbox& mailbox(std::byte* outbox, int destination) {
  return reinterpret_cast<Mailbox*>(outbox)[destination];
}

// Where in the segment of the outbox the data of a small message lie.
inline std::size_t inline_offset(int size, int destination, std::size_t message) {
  return static_cast<std::size_t>(size) * sizeof(Mailbox) +
         (static_cast<std::size_t>(destination) * kMessages + message) * kInlineBytes;
}

}  // namespace accelerate_cpp::comm
