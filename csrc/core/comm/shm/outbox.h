// The messages that one rank has posted for the others: what lies in its outbox segment.
//
//   for each destination
//     0    posted      8   messages posted so far
//     64   messages        kMessages descriptions of 64 bytes
//   then, for each destination and message, kInlineBytes for the data of a small message
//
// The sender fills a free message and sets it to kPosted; the receiver that takes it sets it to kTaken and, when it has
// copied the data, back to kFree. Data of larger messages lie in other segments of the sender's arena.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace accelerate_cpp::comm {

enum class MessageState : std::uint32_t { kFree, kPosted, kTaken };

struct alignas(64) Message {
  std::atomic<MessageState> state;
  std::uint32_t segment;  // where the data are
  std::uint64_t offset_bytes;
  std::uint64_t tag;
  std::uint64_t count;                 // elements
  std::uint64_t order;                 // among the messages for the same destination
  std::atomic<std::uint64_t> written;  // bytes of the data that are there
  DType dtype;
};

inline constexpr std::size_t kMessages = 64;
inline constexpr std::size_t kInlineBytes = 4096;

struct Mailbox {
  std::atomic<std::uint64_t> posted;
  Message messages[kMessages];
};

static_assert(sizeof(Message) == 64 && offsetof(Mailbox, messages) == 64, "see the layout above");

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
