#include "core/comm/shm/outbox.h"

#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <set>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

// Fresh memory of an outbox for `size` ranks, as a segment gives it.
class OutboxMemory {
 public:
  explicit OutboxMemory(int size) : size_bytes_(outbox_bytes(size)) {
    data_ = static_cast<std::byte*>(::operator new(size_bytes_, kAlignment));
    std::memset(data_, 0, size_bytes_);
  }
  ~OutboxMemory() { ::operator delete(data_, kAlignment); }
  OutboxMemory(const OutboxMemory&) = delete;
  OutboxMemory& operator=(const OutboxMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{4096};

  std::size_t size_bytes_;
  std::byte* data_;
};

TEST(Outboxes, AreFreshWhenTheirMemoryIsZero) {
  const OutboxMemory outbox(3);
  for (int destination = 0; destination < 3; ++destination) {
    Mailbox& box = mailbox(outbox.data(), destination);
    EXPECT_EQ(box.posted.load(), 0u);
    EXPECT_EQ(box.wanted.load(), 0u);
    EXPECT_EQ(box.held_back.load(), 0u);
    EXPECT_EQ(box.next.load(), 0u);
    EXPECT_EQ(box.refused.load(), 0u);
    for (const Message& message : box.messages) {
      EXPECT_EQ(message.state.load(), MessageState::kFree);
    }
  }
}

TEST(Outboxes, GiveEveryMessageItsOwnLineAndItsOwnRoomForData) {
  constexpr int kSize = 3;
  const OutboxMemory outbox(kSize);
  std::set<std::size_t> rooms;
  const std::byte* end_of_mailboxes = outbox.data();
  for (int destination = 0; destination < kSize; ++destination) {
    Mailbox& box = mailbox(outbox.data(), destination);
    EXPECT_GE(reinterpret_cast<std::byte*>(&box), end_of_mailboxes);
    end_of_mailboxes = reinterpret_cast<std::byte*>(&box + 1);
    for (std::size_t i = 0; i < kMessages; ++i) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(&box.messages[i]) % 64, 0u);
      rooms.insert(inline_offset(kSize, destination, i));
    }
  }
  EXPECT_EQ(rooms.size(), kSize * kMessages);
  EXPECT_GE(outbox.data() + *rooms.begin(), end_of_mailboxes);
  for (auto room = rooms.begin(); std::next(room) != rooms.end(); ++room) {
    EXPECT_GE(*std::next(room) - *room, kInlineBytes);
  }
  EXPECT_LE(*rooms.rbegin() + kInlineBytes, outbox.size_bytes());
}

}  // namespace
}  // namespace accelerate_cpp::comm
