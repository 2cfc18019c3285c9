#include "core/comm/message_matcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::soon;

constexpr std::size_t kInlineBytes = 64;

using Body = std::function<void(const std::shared_ptr<MessageMatcher>& messages, int rank)>;

// Calls `body` in each rank, then waits for the other ranks.
void run_ranks(int size, const Body& body, const WaitHooks& hooks = {}) {
  testing::run_threads(size, [&](Store& store, int rank) {
    const std::shared_ptr<Communicator> communicator = ShmCommunicator::connect(store, rank, size, soon(), hooks);
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::shared_ptr<MessageMatcher::Port>> ports(static_cast<std::size_t>(size),
                                                             make_port(communicator, all));
    const auto messages = std::make_shared<MessageMatcher>(rank, ports, kInlineBytes, hooks);
    body(messages, rank);
    communicator->barrier(soon());
    messages->close();
  });
}

std::vector<std::uint8_t> bytes(std::size_t count, int value) {
  return std::vector<std::uint8_t>(count, static_cast<std::uint8_t>(value));
}

ConstMemoryView view(const std::vector<std::uint8_t>& data) {
  return {data.data(), data.size(), DType::kUInt8};
}

MemoryView view(std::vector<std::uint8_t>& data) {
  return {data.data(), data.size(), DType::kUInt8};
}

TEST(MessageMatcher, CarriesMessagesOfEverySize) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, kInlineBytes, kInlineBytes + 1, std::size_t{3000000}}) {
      if (rank == 0) {
        messages->send(view(bytes(count, 7)), 1, 9, soon())->wait(soon());
      } else {
        std::vector<std::uint8_t> data(count);
        const auto transfer = messages->receive(view(data), 0, 9, soon());
        transfer->wait(soon());
        EXPECT_EQ(data, bytes(count, 7));
        EXPECT_EQ(transfer->source(), 0);
        EXPECT_TRUE(transfer->poll());
      }
    }
  });
}

TEST(MessageMatcher, KeepsTheOrderOfEachTagAlone) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    // Inline and longer ones in turn: what follows an envelope may not overtake.
    const auto count = [](int i) { return i % 2 == 0 ? kInlineBytes : 2 * kInlineBytes; };
    if (rank == 0) {
      for (int i = 0; i < 6; ++i) {
        messages->send(view(bytes(count(i), i)), 1, static_cast<std::uint64_t>(i / 3), soon())->wait(soon());
      }
    } else {
      std::vector<std::vector<std::uint8_t>> data;
      std::vector<std::shared_ptr<Transfer>> transfers;
      data.reserve(6);
      for (const int i : {3, 4, 0, 1, 5, 2}) {
        data.emplace_back(count(i));
        transfers.push_back(messages->receive(view(data.back()), 0, static_cast<std::uint64_t>(i / 3), soon()));
      }
      const int order[] = {3, 4, 0, 1, 5, 2};
      for (std::size_t k = 6; k-- > 0;) {
        transfers[k]->wait(soon());
        EXPECT_EQ(data[k], bytes(count(order[k]), order[k]));
      }
    }
  });
}

TEST(MessageMatcher, GivesAMessageToTheFirstReceiveThatCouldTakeIt) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    if (rank == 0) {
      messages->send(view(bytes(1, 1)), 1, 0, soon())->wait(soon());
      messages->send(view(bytes(1, 2)), 1, 0, soon())->wait(soon());
    } else {
      std::vector<std::uint8_t> first(1);
      std::vector<std::uint8_t> second(1);
      const auto any = messages->receive(view(first), Communicator::kAnySource, 0, soon());
      const auto one = messages->receive(view(second), 0, 0, soon());
      one->wait(soon());
      any->wait(soon());
      EXPECT_EQ(first[0], 1);
      EXPECT_EQ(second[0], 2);
      EXPECT_EQ(any->source(), 0);
    }
  });
}

TEST(MessageMatcher, RefusesAMessageOfAnotherSizeAndGoesOnWithTheNext) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    for (const std::size_t count : {std::size_t{2}, 2 * kInlineBytes}) {
      if (rank == 0) {
        messages->send(view(bytes(count, 1)), 1, 4, Call(soon()))->wait(soon());
        messages->send(view(bytes(count, 2)), 1, 4, Call(soon()))->wait(soon());
      } else {
        std::vector<std::uint8_t> data(count + 1);
        const auto wrong = messages->receive(view(data), 0, 4, Call(soon(), {}, "train.py:5"));
        EXPECT_THAT(message_of<MismatchedCollective>([&] { wrong->wait(soon()); }),
                    AllOf(HasSubstr("rank 0 sent " + std::to_string(count) + " uint8 with tag 4"),
                          HasSubstr("receive of " + std::to_string(count + 1) + " uint8 from rank 0"),
                          HasSubstr("at train.py:5")));
        data.resize(count);
        messages->receive(view(data), 0, 4, soon())->wait(soon());
        EXPECT_EQ(data, bytes(count, 2));
      }
    }
  });
}

TEST(MessageMatcher, LeavesAReceivePostedWhenAWaitTimesOut) {
  std::atomic<bool> timed_out{false};
  run_ranks(2, [&](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    if (rank == 0) {
      while (!timed_out) {
        std::this_thread::yield();
      }
      messages->send(view(bytes(1, 5)), 1, 0, soon())->wait(soon());
    } else {
      std::vector<std::uint8_t> data(1);
      const auto transfer = messages->receive(view(data), 0, 0, soon());
      EXPECT_THROW(transfer->wait(Deadline::after(milliseconds(20))), Timeout);
      timed_out = true;
      transfer->wait(soon());
      EXPECT_EQ(data[0], 5);
    }
  });
}

TEST(MessageMatcher, FailsAReceiveWhoseOwnDeadlineHasPassed) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    if (rank == 1) {
      std::vector<std::uint8_t> data(1);
      const auto transfer = messages->receive(view(data), 0, 0, Deadline::after(milliseconds(20)));
      EXPECT_THAT(message_of<Timeout>([&] { transfer->wait(soon()); }), HasSubstr("nothing came for"));
      EXPECT_TRUE(transfer->poll());
    }
  });
}

TEST(MessageMatcher, LetsSeveralThreadsWaitAtOnce) {
  run_ranks(3, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    if (rank > 0) {
      for (std::uint64_t tag = 4; tag-- > 0;) {
        messages->send(view(bytes(200, rank * 10 + static_cast<int>(tag))), 0, tag, soon())->wait(soon());
      }
      return;
    }
    std::vector<std::thread> threads;
    for (std::uint64_t tag = 0; tag < 4; ++tag) {
      for (const int source : {1, 2}) {
        threads.emplace_back([&messages, tag, source] {
          std::vector<std::uint8_t> data(200);
          messages->receive(view(data), source, tag, soon())->wait(soon());
          EXPECT_EQ(data, bytes(200, source * 10 + static_cast<int>(tag)));
        });
      }
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(MessageMatcher, CanInterruptAThreadThatAnotherOneWaitsFor) {
  static thread_local int* probes = nullptr;  // of a thread that goes on
  static thread_local bool is_interrupted = false;
  WaitHooks hooks;
  hooks.probe = [] {
    if (is_interrupted) {
      throw std::runtime_error("interrupted");
    }
    if (probes != nullptr) {
      ++*probes;
    }
  };
  const Body body = [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    if (rank == 0) {
      std::vector<std::uint8_t> go(1);
      messages->receive(view(go), 1, 3, soon())->wait(soon());
      messages->send(view(bytes(1, 5)), 1, 1, soon())->wait(soon());
      return;
    }
    std::atomic<bool> waits{false};
    std::thread other([&] {
      int count = 0;
      probes = &count;
      std::vector<std::uint8_t> data(1);
      const auto message = messages->receive(view(data), 0, 1, soon());
      while (count == 0) {
        EXPECT_THROW(message->wait(Deadline::after(milliseconds(20))), Timeout);
      }
      waits = true;
      message->wait(soon());
      EXPECT_EQ(data, bytes(1, 5));
    });
    while (!waits) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(milliseconds(20));  // now the other thread most likely waits
    is_interrupted = true;
    std::vector<std::uint8_t> never(1);
    EXPECT_THROW(messages->receive(view(never), 0, 2, soon())->wait(soon()), std::runtime_error);
    is_interrupted = false;
    messages->send(view(bytes(1, 0)), 0, 3, soon())->wait(soon());
    other.join();
  };
  run_ranks(2, body, hooks);
}

TEST(MessageMatcher, RefusesRanksThatAreNotThere) {
  run_ranks(2, [](const std::shared_ptr<MessageMatcher>& messages, int rank) {
    std::vector<std::uint8_t> data(1);
    EXPECT_THAT(message_of<InvalidArgument>([&] { messages->send(view(data), rank, 0, soon()); }),
                HasSubstr("is not another rank of this group of 2"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { messages->receive(view(data), 2, 0, soon()); }),
                HasSubstr("rank 2 is not another rank"));
  });
}

// A port whose messages never come, or whose peer is lost once `lost` is set; to it as `Loss`.
template <class Loss = PeerLost>
class DeadPort final : public MessageMatcher::Port {
 public:
  std::shared_ptr<Transfer> send(ConstMemoryView, int, std::uint32_t, const Call&) override { return nullptr; }
  std::shared_ptr<Transfer> receive(MemoryView, int source, std::uint32_t, const Call&) override {
    return std::make_shared<Receive>(lost, source);
  }

  std::shared_ptr<std::atomic<bool>> lost = std::make_shared<std::atomic<bool>>(false);

 private:
  class Receive final : public Transfer {
   public:
    Receive(std::shared_ptr<std::atomic<bool>> lost, int source) : lost_(std::move(lost)), source_(source) {}
    bool poll() noexcept override { return *lost_; }
    void wait(Deadline deadline) override {
      while (!*lost_) {
        if (deadline.expired()) {
          throw Timeout("not yet");
        }
        std::this_thread::yield();
      }
      throw Loss("rank " + std::to_string(source_) + " has ended");
    }
    int source() const override { return source_; }

   private:
    std::shared_ptr<std::atomic<bool>> lost_;
    int source_;
  };
};

TEST(MessageMatcher, FailsWhatCouldComeFromALostRankNowAndLater) {
  const auto alive = std::make_shared<DeadPort<>>();
  const auto dying = std::make_shared<DeadPort<>>();
  const auto messages = std::make_shared<MessageMatcher>(
      0, std::vector<std::shared_ptr<MessageMatcher::Port>>{nullptr, alive, dying}, kInlineBytes);
  std::vector<std::uint8_t> data(1);
  const auto from_1 = messages->receive(view(data), 1, 0, soon());
  const auto from_2 = messages->receive(view(data), 2, 0, soon());
  const auto from_any = messages->receive(view(data), Communicator::kAnySource, 0, soon());
  EXPECT_FALSE(from_2->poll());
  *dying->lost = true;
  EXPECT_THAT(message_of<PeerLost>([&] { from_2->wait(soon()); }), HasSubstr("rank 2 has ended"));
  EXPECT_THAT(message_of<PeerLost>([&] { from_any->wait(soon()); }), HasSubstr("rank 2 has ended"));
  EXPECT_THROW(messages->receive(view(data), 2, 0, soon())->wait(soon()), PeerLost);
  EXPECT_FALSE(from_1->poll());
  messages->close();
  EXPECT_THAT(message_of<PeerLost>([&] { from_1->wait(soon()); }), HasSubstr("was closed"));
  EXPECT_THROW(messages->receive(view(data), 1, 0, soon()), PeerLost);
}

TEST(MessageMatcher, KeepsWaitingForAnyRankUntilTheLastOneHasLeft) {
  const auto first = std::make_shared<DeadPort<PeerLeft>>();
  const auto last = std::make_shared<DeadPort<PeerLeft>>();
  const auto messages = std::make_shared<MessageMatcher>(
      0, std::vector<std::shared_ptr<MessageMatcher::Port>>{nullptr, first, last}, kInlineBytes);
  std::vector<std::uint8_t> data(1);
  const auto early = messages->receive(view(data), Communicator::kAnySource, 0, soon());
  *first->lost = true;
  EXPECT_THROW(messages->receive(view(data), 1, 0, soon())->wait(soon()), PeerLeft);
  EXPECT_FALSE(early->poll());
  const auto late = messages->receive(view(data), Communicator::kAnySource, 0, soon());
  EXPECT_FALSE(late->poll());
  *last->lost = true;
  EXPECT_THAT(message_of<PeerLost>([&] { early->wait(soon()); }), HasSubstr("rank 2 has ended"));
  EXPECT_THROW(late->wait(soon()), PeerLost);
}

}  // namespace
}  // namespace accelerate_cpp::comm
