#include "core/comm/shm/point_to_point.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/shm/engines.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::Engine;
using testing::expect_message;
using ::testing::HasSubstr;
using testing::Integers;
using testing::meet;
using testing::passed;
using testing::run_engines;
using testing::send;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr int kAny = Communicator::kAnySource;
constexpr std::size_t kLarge = 100000;  // integers: more than fits into the outbox

TEST(PointToPoint, FindsEveryMessageByItsTagInWhateverOrderItIsAskedFor) {
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      for (const std::uint64_t tag : {0u, 1u, 2u, 3u, 4u, 5u}) {
        send(engine, 1, tag, Integers(10 + tag, static_cast<int>(100 * tag)));
      }
    } else {
      for (const std::uint64_t tag : {5u, 0u, 3u, 4u, 1u, 2u}) {
        expect_message(engine, 0, tag, 10 + tag, static_cast<int>(100 * tag));
      }
    }
  });
}

// Each message takes a block of its own, of which the receiver has to be told.
TEST(PointToPoint, DeliversWhatHasBeenSentAlthoughTheSenderIsGoneBeforeAnyoneReads) {
  constexpr int kMany = 600;
  constexpr std::size_t kCount = 1280;
  std::atomic<int> sent{-1};
  run_engines(2, [&](Engine& engine) {
    if (engine.rank() == 0) {
      std::deque<Integers> data;
      std::vector<std::shared_ptr<Transfer>> transfers;
      for (int i = 0; i < kMany; ++i) {
        transfers.push_back(engine.messages->send(data.emplace_back(kCount, i).view(), 1, 0, soon()));
      }
      int ended = 0;
      while (ended < kMany && transfers[static_cast<std::size_t>(ended)]->poll()) {
        ++ended;
      }
      transfers.clear();
      engine.group->leave();
      sent = ended;
    } else {
      while (sent < 0) {
        std::this_thread::yield();
      }
      EXPECT_GT(sent, 10);
      for (int i = 0; i < sent; ++i) {
        expect_message(engine, 0, 0, kCount, i);
      }
    }
  });
}

TEST(PointToPoint, TellsTagsApartThatDifferInAnyOfTheir64Bits) {
  run_engines(2, [](Engine& engine) {
    const std::uint64_t tags[] = {0, 1, std::uint64_t{1} << 32, ~std::uint64_t{0}};
    for (int i = 0; i < 4; ++i) {
      engine.rank() == 0 ? send(engine, 1, tags[i], Integers(1, i)) : expect_message(engine, 0, tags[3 - i], 1, 3 - i);
    }
  });
}

TEST(PointToPoint, KeepsTheOrderOfMessagesWithTheSameTagHoweverManyThereAre) {
  constexpr int kMany = 2 * OutgoingMessages::kEagerMessages + 5;
  run_engines(2, [](Engine& engine) {
    std::deque<Integers> data;
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int i = 0; i < kMany; ++i) {
      data.emplace_back(3, engine.rank() == 0 ? 10 * i : -1);
      transfers.push_back(engine.rank() == 0 ? engine.messages->send(data.back().view(), 1, 7, soon())
                                             : engine.messages->receive(data.back().view(), 0, 7, soon()));
    }
    for (const auto& transfer : transfers) {
      transfer->wait(soon());
    }
    for (int i = 0; i < kMany; ++i) {
      data[static_cast<std::size_t>(i)].expect(10 * i);
    }
  });
}

TEST(PointToPoint, KeepsTheOrderOfMessagesWhileTheyArePostedAndReceivedAtOnce) {
  run_engines(2, [](Engine& engine) {
    const int peer = 1 - engine.rank();
    for (int round = 0; round < 60; ++round) {
      std::deque<Integers> data;
      std::vector<std::shared_ptr<Transfer>> receives;
      for (int i = 0; i < 8; ++i) {
        data.emplace_back(2, -1);
        receives.push_back(engine.messages->receive(data.back().view(), i % 4 == 3 ? kAny : peer, 0, soon()));
        send(engine, peer, 0, Integers(2, 100 * round + i));
      }
      for (int i = 7; i >= 0; --i) {
        receives[static_cast<std::size_t>(i)]->wait(soon());
        data[static_cast<std::size_t>(i)].expect(100 * round + i);
      }
    }
  });
}

TEST(PointToPoint, FindsMessagesInTheReverseOrderHoweverManyThereAre) {
  constexpr int kMany = 2 * OutgoingMessages::kEagerMessages + 5;
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      std::vector<Integers> data;
      std::vector<std::shared_ptr<Transfer>> transfers;
      data.reserve(kMany);
      for (int i = 0; i < kMany; ++i) {
        data.emplace_back(3, i);
        transfers.push_back(engine.messages->send(data.back().view(), 1, static_cast<std::uint64_t>(i), soon()));
      }
      meet(*engine.group);
      for (const auto& transfer : transfers) {
        transfer->wait(soon());
      }
    } else {
      meet(*engine.group);
      for (int i = kMany - 1; i >= 0; --i) {
        expect_message(engine, 0, static_cast<std::uint64_t>(i), 3, i);
      }
    }
  });
}

TEST(PointToPoint, LetsAllRanksSendBeforeAnyOfThemReceives) {
  run_engines(3, [](Engine& engine) {
    for (int r = 0; r < 3; ++r) {
      if (r != engine.rank()) {
        send(engine, r, 0, Integers(kLarge, engine.rank()));
      }
    }
    meet(*engine.group);
    for (int r = 0; r < 3; ++r) {
      if (r != engine.rank()) {
        expect_message(engine, r, 0, kLarge, r);
      }
    }
  });
}

TEST(PointToPoint, TakesMessagesFromAnyRankAndSaysFromWhich) {
  run_engines(4, [](Engine& engine) {
    if (engine.rank() > 0) {
      send(engine, 0, 5, Integers(4, 1000 * engine.rank()));
      return;
    }
    std::vector<int> sources;
    for (int i = 1; i < 4; ++i) {
      Integers data(4, -1);
      const auto transfer = engine.messages->receive(data.view(), kAny, 5, soon());
      transfer->wait(soon());
      data.expect(1000 * transfer->source());
      sources.push_back(transfer->source());
    }
    EXPECT_THAT(sources, ::testing::UnorderedElementsAre(1, 2, 3));
  });
}

TEST(PointToPoint, GivesAMessageToTheReceiveThatWasPostedFirst) {
  run_engines(2, [](Engine& engine) {
    if (engine.rank() == 0) {
      Integers first(1, -1);
      Integers second(1, -1);
      Integers third(1, -1);
      const auto from_one = engine.messages->receive(first.view(), 1, 0, soon());
      const auto from_any = engine.messages->receive(second.view(), kAny, 0, soon());
      const auto again = engine.messages->receive(third.view(), 1, 0, soon());
      meet(*engine.group);
      again->wait(soon());
      EXPECT_TRUE(from_one->poll());
      EXPECT_TRUE(from_any->poll());
      first.expect(10);
      second.expect(20);
      third.expect(30);
    } else {
      meet(*engine.group);
      for (const int value : {10, 20, 30}) {
        send(engine, 0, 0, Integers(1, value));
      }
    }
  });
}

TEST(PointToPoint, CarriesMessagesOfEverySizeAtWhichTheirDataLieElsewhere) {
  const std::size_t inline_count = kInlineBytes / sizeof(std::int32_t);
  const std::vector<std::size_t> counts = {
      0,     1,     inline_count - 1, inline_count, inline_count + 1, 16383, 16384, 16385, 65535,
      65536, 65537, (1u << 18) - 1,   1u << 18,     (1u << 18) + 1,   700001};
  run_engines(2, [&](Engine& engine) {
    for (std::uint64_t tag = 0; tag < counts.size(); ++tag) {
      const auto first = static_cast<std::int32_t>(tag);
      engine.rank() == 0 ? send(engine, 1, tag, Integers(counts[tag], first))
                         : expect_message(engine, 0, tag, counts[tag], first);
    }
  });
}

TEST(PointToPoint, CarriesEmptyMessagesThatHaveNoMemoryAtAll) {
  run_engines(2, [](Engine& engine) {
    const MemoryView nothing{nullptr, 0, DType::kFloat64};
    if (engine.rank() == 0) {
      engine.messages->send(nothing, 1, 3, soon())->wait(soon());
    } else {
      engine.messages->receive(nothing, 0, 3, soon())->wait(soon());
    }
  });
}

TEST(PointToPoint, IsIndependentOfCollectives) {
  run_engines(2, [](Engine& engine) {
    Integers data(kLarge, engine.rank() == 0 ? 5 : -1);
    const auto transfer = engine.rank() == 0 ? engine.messages->send(data.view(), 1, 0, soon())
                                             : engine.messages->receive(data.view(), 0, 0, soon());
    for (int i = 0; i < 10; ++i) {
      meet(*engine.group);
    }
    transfer->wait(soon());
    data.expect(5);
  });
}

TEST(PointToPoint, CompletesTransfersWhoseHandlesWereDropped) {
  run_engines(2, [](Engine& engine) {
    Integers data(5, engine.rank() == 0 ? 8 : -1);
    if (engine.rank() == 0) {
      engine.messages->send(data.view(), 1, 0, soon());
    } else {
      engine.messages->receive(data.view(), 0, 0, soon());
    }
    // What comes later on the same way comes after it.
    engine.rank() == 0 ? send(engine, 1, 0, Integers(1, 1)) : expect_message(engine, 0, 0, 1, 1);
    data.expect(8);
  });
}

TEST(PointToPoint, CanBeWaitedForOnceItHasCompletedHoweverOften) {
  run_engines(2, [](Engine& engine) {
    Integers data(5, 8);
    const auto transfer = engine.rank() == 0 ? engine.messages->send(data.view(), 1, 0, soon())
                                             : engine.messages->receive(data.view(), 0, 0, soon());
    transfer->wait(soon());
    EXPECT_NO_THROW(transfer->wait(passed()));
    EXPECT_TRUE(transfer->poll());
  });
}

TEST(PointToPoint, RefusesRanksThatAreNotOthersOfTheGroup) {
  run_engines(2, [](Engine& engine) {
    Integers data(1);
    for (const int peer : {engine.rank(), 2, -2}) {
      EXPECT_THAT([&] { engine.messages->send(data.view(), peer, 0, soon()); },
                  ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("send"), HasSubstr("rank " + std::to_string(peer)))));
      EXPECT_THAT([&] { engine.messages->receive(data.view(), peer, 0, soon()); },
                  ThrowsMessage<InvalidArgument>(HasSubstr("receive")));
    }
    EXPECT_THROW(engine.messages->send(data.view(), kAny, 0, soon()), InvalidArgument);
    meet(*engine.group);
  });
}

TEST(PointToPoint, LetsSeveralThreadsWaitAtOnce) {
  run_engines(2, [](Engine& engine) {
    std::vector<std::thread> threads;
    for (std::uint64_t tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&engine, tag] {
        for (int i = 0; i < 30; ++i) {
          const std::size_t count = i % 3 == 0 ? kLarge : 7;
          engine.rank() == 0 ? send(engine, 1, tag, Integers(count, i)) : expect_message(engine, 0, tag, count, i);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
