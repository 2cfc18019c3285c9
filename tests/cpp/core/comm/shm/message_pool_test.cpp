// The blocks of messages, and messages for which there is no block.
#include "core/comm/shm/message_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/comm/shm/engines.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Engine;
using testing::expect_message;
using testing::Integers;
using testing::meet;
using testing::run_engines;
using testing::send;
using testing::soon;

constexpr std::size_t kPoolBytes = 64 * 1024;
constexpr std::size_t kFillsPool = kPoolBytes / sizeof(std::int32_t);

// The arena of a rank that has no peers.
std::shared_ptr<Arena> lonely_arena() {
  return std::make_shared<Arena>(std::vector<std::unique_ptr<Channel>>(1));
}

void post(Message& message) {
  message.state.store(MessageState::kPosted);
}

void finish(Message& message) {
  message.state.store(MessageState::kFree);
}

TEST(MessagePools, NameTheBlockInTheMessage) {
  const auto arena = lonely_arena();
  MessagePool pool(arena, 2 * kPoolBytes);
  Message messages[2] = {};
  for (Message& message : messages) {
    std::byte* const room = pool.take(message, kPoolBytes);
    ASSERT_NE(room, nullptr);
    post(message);
    const auto place = arena->find(room, kPoolBytes);
    ASSERT_TRUE(place.has_value());
    EXPECT_EQ(place->segment, message.segment);
    EXPECT_EQ(place->offset_bytes, message.offset_bytes);
  }
  EXPECT_NE(messages[0].segment, messages[1].segment);
}

TEST(MessagePools, GiveNoMoreThanTheirLimitUntilAMessageHasBeenReceived) {
  MessagePool pool(lonely_arena(), 2 * kPoolBytes);
  Message messages[3] = {};
  std::byte* const first = pool.take(messages[0], kPoolBytes);
  post(messages[0]);
  pool.take(messages[1], kPoolBytes);
  post(messages[1]);
  EXPECT_EQ(pool.take(messages[2], 1), nullptr);
  messages[0].state.store(MessageState::kTaken);
  pool.reclaim();
  EXPECT_EQ(pool.take(messages[2], 1), nullptr) << "it is still being received";
  finish(messages[0]);
  pool.reclaim();
  EXPECT_EQ(pool.take(messages[2], 1), first);
}

TEST(MessagePools, TakeTheSmallestIdleBlockThatFits) {
  MessagePool pool(lonely_arena(), 16 * kPoolBytes);
  Message messages[3] = {};
  std::byte* const large = pool.take(messages[0], 4 * kPoolBytes);
  post(messages[0]);
  std::byte* const small = pool.take(messages[1], kPoolBytes);
  post(messages[1]);
  finish(messages[0]);
  finish(messages[1]);
  pool.reclaim();
  EXPECT_EQ(pool.take(messages[0], 100), small);
  post(messages[0]);
  EXPECT_EQ(pool.take(messages[1], 2 * kPoolBytes), large);
}

TEST(MessagePools, DropIdleBlocksThatAreTooSmallBeforeTheyExceedTheirLimit) {
  const auto arena = lonely_arena();
  MessagePool pool(arena, 4 * kPoolBytes);
  Message messages[4] = {};
  std::vector<std::byte*> rooms;
  for (Message& message : messages) {
    rooms.push_back(pool.take(message, kPoolBytes));
    post(message);
  }
  for (const std::size_t i : {0u, 1u, 2u}) {
    finish(messages[i]);
  }
  pool.reclaim();
  EXPECT_NE(pool.take(messages[0], 2 * kPoolBytes), nullptr);
  const auto now_there = arena->find(rooms[1], 1);
  EXPECT_TRUE(!now_there || now_there->segment == messages[0].segment) << "only the new one may lie where it lay";
  EXPECT_TRUE(arena->find(rooms[3], 1)) << "it is in use";
}

TEST(MessagePools, GiveASingleMessageMoreThanTheirLimit) {
  MessagePool pool(lonely_arena(), kPoolBytes);
  Message messages[2] = {};
  EXPECT_NE(pool.take(messages[0], 10 * kPoolBytes), nullptr);
  post(messages[0]);
  EXPECT_EQ(pool.take(messages[1], 1), nullptr);
}

TEST(MessagePools, GiveMoreThanTheirLimitWhenTheyAreToldTo) {
  MessagePool pool(lonely_arena(), kPoolBytes);
  Message messages[2] = {};
  pool.take(messages[0], kPoolBytes);
  post(messages[0]);
  EXPECT_EQ(pool.take(messages[1], kPoolBytes), nullptr);
  EXPECT_NE(pool.take(messages[1], kPoolBytes, true), nullptr);
}

TEST(MessagePools, TakeLittleMoreThanTheyAreAskedFor) {
  const auto arena = lonely_arena();
  MessagePool pool(arena, 64 * kPoolBytes);
  Message message = {};
  std::byte* const room = pool.take(message, 17 * kPoolBytes);
  EXPECT_TRUE(arena->find(room, 17 * kPoolBytes));
  EXPECT_FALSE(arena->find(room, 20 * kPoolBytes + 1));
}

TEST(MessagePools, GiveABlockAgainWhoseMessageWasRefused) {
  MessagePool pool(lonely_arena(), kPoolBytes);
  Message messages[2] = {};
  std::byte* const room = pool.take(messages[0], kPoolBytes);
  messages[0].state.store(MessageState::kRefused);
  pool.reclaim();
  EXPECT_EQ(pool.take(messages[1], kPoolBytes), room);
}

TEST(MessagesInAPool, AreHeldBackUntilThereIsRoom) {
  run_engines(
      2,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          Integers first(kFillsPool, 1);
          Integers second(kFillsPool, 2);
          const auto sent = engine.messages->send(first.view(), 1, 1, soon());
          const auto held_back = engine.messages->send(second.view(), 1, 2, soon());
          EXPECT_TRUE(sent->poll());
          EXPECT_FALSE(held_back->poll());
          meet(*engine.group);
          held_back->wait(soon());
        } else {
          meet(*engine.group);
          expect_message(engine, 0, 1, kFillsPool, 1);
          expect_message(engine, 0, 2, kFillsPool, 2);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, MayBeLargerThanItWhenNothingElseIsOnItsWay) {
  run_engines(
      2,
      [](Engine& engine) {
        for (int i = 0; i < 3; ++i) {
          const std::size_t count = kFillsPool * static_cast<std::size_t>(5 - i);
          engine.rank() == 0 ? send(engine, 1, 0, Integers(count, i)) : expect_message(engine, 0, 0, count, i);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, KeepTheirOrderWhenOneOfThemIsHeldBack) {
  run_engines(
      2,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          Integers data[] = {Integers(kFillsPool, 1), Integers(kFillsPool, 2), Integers(1, 3)};
          std::vector<std::shared_ptr<Transfer>> transfers;
          for (Integers& message : data) {
            transfers.push_back(engine.messages->send(message.view(), 1, 0, soon()));
          }
          EXPECT_FALSE(transfers[2]->poll()) << "it would fit, but would overtake the second";
          meet(*engine.group);
          transfers[2]->wait(soon());
        } else {
          meet(*engine.group);
          expect_message(engine, 0, 0, kFillsPool, 1);
          expect_message(engine, 0, 0, kFillsPool, 2);
          expect_message(engine, 0, 0, 1, 3);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, AreSentBeyondItsLimitWhenTheirReceiveIsPosted) {
  run_engines(
      2,
      [](Engine& engine) {
        constexpr std::uint64_t kTags = 20;
        if (engine.rank() == 0) {
          std::vector<Integers> data(kTags, Integers(kFillsPool));
          std::vector<std::shared_ptr<Transfer>> transfers;
          for (std::uint64_t tag = 0; tag < kTags; ++tag) {
            transfers.push_back(engine.messages->send(data[tag].view(), 1, tag, soon()));
          }
          EXPECT_FALSE(transfers.back()->poll());
          meet(*engine.group);
          for (const auto& transfer : transfers) {
            transfer->wait(soon());
          }
        } else {
          meet(*engine.group);
          for (std::uint64_t tag = kTags; tag-- > 0;) {
            expect_message(engine, 0, tag, kFillsPool, 0);
          }
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, AreHeldBackThoughAReceiveWithAnotherTagIsPosted) {
  run_engines(
      2,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          send(engine, 1, 1, Integers(kFillsPool, 1));
          Integers more(kFillsPool, 2);
          const auto held_back = engine.messages->send(more.view(), 1, 1, soon());
          meet(*engine.group);
          EXPECT_FALSE(held_back->poll()) << "a slow receiver that listens for something else";
          meet(*engine.group);
          send(engine, 1, 99, Integers(1, 3));
          held_back->wait(soon());
        } else {
          Integers end(1);
          const auto listens = engine.messages->receive(end.view(), 0, 99, soon());
          meet(*engine.group);
          EXPECT_FALSE(listens->poll());
          meet(*engine.group);
          listens->wait(soon());
          end.expect(3);
          expect_message(engine, 0, 1, kFillsPool, 1);
          expect_message(engine, 0, 1, kFillsPool, 2);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, AreSentBeyondItsLimitWhenAllRanksSendFirst) {
  for (const int size : {2, 3}) {
    run_engines(
        size,
        [size](Engine& engine) {
          const int next = (engine.rank() + 1) % size;
          for (int i = 0; i < 10; ++i) {
            send(engine, next, 0, Integers(kFillsPool, 100 * engine.rank() + i));
          }
          const int before = (engine.rank() + size - 1) % size;
          for (int i = 0; i < 10; ++i) {
            expect_message(engine, before, 0, kFillsPool, 100 * before + i);
          }
        },
        kPoolBytes);
  }
}

TEST(MessagesInAPool, AreSentBeyondItsLimitWhenTheirReceiverWaitsInACollective) {
  run_engines(
      2,
      [](Engine& engine) {
        for (int i = 0; i < 5 && engine.rank() == 0; ++i) {
          send(engine, 1, 0, Integers(kFillsPool, i));
        }
        meet(*engine.group);
        for (int i = 0; i < 5 && engine.rank() == 1; ++i) {
          expect_message(engine, 0, 0, kFillsPool, i);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, HoldUpOnlyTheRankWhoseMessagesAreNotTaken) {
  run_engines(3, [](Engine& engine) {
    if (engine.rank() == 0) {
      constexpr std::size_t kMessages = OutgoingMessages::kEagerMessages;
      std::vector<Integers> data(kMessages + 1, Integers(2, 4));
      std::vector<std::shared_ptr<Transfer>> transfers;
      for (Integers& message : data) {
        transfers.push_back(engine.messages->send(message.view(), 1, 0, soon()));
      }
      EXPECT_TRUE(transfers[kMessages - 1]->poll());
      EXPECT_FALSE(transfers[kMessages]->poll()) << "all slots for rank 1 are in use";
      send(engine, 2, 0, Integers(3, 9));
      meet(*engine.group);
      transfers[kMessages]->wait(soon());
    } else if (engine.rank() == 1) {
      meet(*engine.group);
      for (std::size_t i = 0; i < OutgoingMessages::kEagerMessages + 1; ++i) {
        expect_message(engine, 0, 0, 2, 4);
      }
    } else {
      expect_message(engine, 0, 0, 3, 9);
      meet(*engine.group);
    }
  });
}

TEST(MessagesInAPool, LeaveTheirRoomToOthersThoughASmallMessageUsesTheirSlot) {
  run_engines(
      2,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          send(engine, 1, 1, Integers(kFillsPool, 1));
          meet(*engine.group);
          send(engine, 1, 2, Integers(2, 2));  // not received before the next one
          send(engine, 1, 3, Integers(kFillsPool, 3));
        } else {
          expect_message(engine, 0, 1, kFillsPool, 1);
          meet(*engine.group);
          expect_message(engine, 0, 3, kFillsPool, 3);
          expect_message(engine, 0, 2, 2, 2);
        }
      },
      kPoolBytes);
}

TEST(MessagesInAPool, UseItsBlocksAgain) {
  run_engines(2, [](Engine& engine) {
    for (int i = 0; i < 50; ++i) {
      const std::size_t count = kFillsPool * static_cast<std::size_t>(1 + i % 3);
      engine.rank() == 0 ? send(engine, 1, 0, Integers(count, i)) : expect_message(engine, 0, 0, count, i);
      engine.rank() == 1 ? send(engine, 0, 0, Integers(1, i)) : expect_message(engine, 1, 0, 1, i);
    }
    // Ids count the segments that were ever made: the control block, the outbox, and at most one block for each size.
    EXPECT_LE(engine.group->arena()->create(1).id, 2u + 3u);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
