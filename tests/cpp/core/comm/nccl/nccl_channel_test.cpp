#include "core/comm/nccl/nccl_channel.h"

#include <memory>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The channel from rank 0 to rank 1, both ends of which this thread moves on.
class NcclChannelTest : public OnDoubles {
 protected:
  struct Side {
    std::unique_ptr<NcclGroup> group;
    std::unique_ptr<NcclChannel> channel;
    std::list<CudaMemory> operands;
    std::list<SharedPosting> postings;
  };

  NcclChannelTest() {
    for (int rank = 0; rank < 2; ++rank) {
      sides_[rank].group =
          std::make_unique<NcclGroup>(context(rank), GroupBoard(store_, "group", rank), options(rank), rank, 2);
    }
    sides_[0].channel = std::make_unique<OutgoingChannel>(*sides_[0].group, 1);
    sides_[1].channel = std::make_unique<IncomingChannel>(*sides_[1].group, 0);
  }
  ~NcclChannelTest() override {
    for (Side& side : sides_) {
      side.channel->retire();
    }
  }

  // Posts `count` int32, all of which are `value` at first.
  SharedPosting post(int rank, std::uint64_t tag, std::size_t count, std::int32_t value, const Call& call = soon()) {
    Side& side = sides_[rank];
    const DeviceGuard guard(*side.group->context().device);
    CudaMemory& memory = side.operands.emplace_back(device(rank), MemoryKind::kDevice, count * sizeof(value));
    const MemoryView view{memory.data(), count, DType::kInt32};
    std::fill_n(static_cast<std::int32_t*>(view.data), count, value);
    side.postings.push_back(std::make_shared<Posting>(*side.group, view, 0, tag, call));
    side.channel->post(side.postings.back());
    return side.postings.back();
  }
  SharedPosting send(std::uint64_t tag, std::size_t count, std::int32_t value) { return post(0, tag, count, value); }
  SharedPosting receive(std::uint64_t tag, std::size_t count) { return post(1, tag, count, -1); }

  void advance(int rank) {
    const DeviceGuard guard(*sides_[rank].group->context().device);
    sides_[rank].channel->advance();
  }
  void advance_until_ended(const SharedPosting& posting) {
    const Deadline deadline = soon();
    while (!posting->ended && !deadline.expired()) {
      advance(0);
      advance(1);
    }
    ASSERT_TRUE(posting->ended) << posting->describe();
  }
  static std::vector<std::int32_t> values(const SharedPosting& posting) {
    const auto* const first = static_cast<const std::int32_t*>(posting->data.data);
    return {first, first + posting->data.count};
  }
  static std::vector<std::int32_t> all(std::size_t count, std::int32_t value) {
    return std::vector<std::int32_t>(count, value);
  }

  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  Side sides_[2];
};

TEST_F(NcclChannelTest, BringsAMessageAcross) {
  const auto sent = send(7, 1000, 42);
  const auto received = receive(7, 1000);
  advance_until_ended(received);
  advance_until_ended(sent);
  EXPECT_EQ(values(received), all(1000, 42));
  EXPECT_EQ(received->error, nullptr);
  EXPECT_EQ(received->source, 0);
}

TEST_F(NcclChannelTest, MakesNothingBeforeTheFirstMessage) {
  advance(0);
  advance(1);
  EXPECT_EQ(gpu_double().count_calls("ncclCommInitRankConfig"), 0u);
}

TEST_F(NcclChannelTest, WaitsForTheSenderWhichMakesTheId) {
  receive(7, 1);
  advance(1);
  EXPECT_EQ(gpu_double().count_calls("ncclCommInitRankConfig"), 0u);
  const auto sent = send(7, 1, 1);
  advance_until_ended(sent);
  EXPECT_EQ(gpu_double().count_calls("ncclCommInitRankConfig"), 2u);
}

TEST_F(NcclChannelTest, DeliversByTagWhateverTheOrder) {
  const auto first = send(1, 3, 11);
  send(2, 3, 22);
  const auto two = receive(2, 3);
  advance_until_ended(two);
  EXPECT_EQ(values(two), all(3, 22));
  EXPECT_TRUE(first->ended) << "an early message is taken in";
  const auto one = receive(1, 3);
  advance_until_ended(one);
  EXPECT_EQ(values(one), all(3, 11));
}

TEST_F(NcclChannelTest, DeliversMessagesWithEqualTagsInOrder) {
  send(5, 1, 1);
  send(5, 1, 2);
  send(9, 1, 9);
  send(5, 1, 3);
  const auto nine = receive(9, 1);
  advance_until_ended(nine);
  for (const std::int32_t expected : {1, 2, 3}) {
    const auto received = receive(5, 1);
    advance_until_ended(received);
    EXPECT_EQ(values(received), all(1, expected));
  }
}

TEST_F(NcclChannelTest, DeliversAnEarlyMessageWhileAnotherReceiveWaits) {
  send(1, 2, 11);
  const auto never_sent = receive(2, 2);
  for (int i = 0; i < 50; ++i) {
    advance(0);
    advance(1);
  }
  const auto one = receive(1, 2);
  advance_until_ended(one);
  EXPECT_EQ(values(one), all(2, 11));
  EXPECT_FALSE(never_sent->ended);
  EXPECT_THAT(sides_[1].channel->pending(), ::testing::ElementsAre(never_sent));
  sides_[1].channel->abort();
}

TEST_F(NcclChannelTest, DeliversAMessageWhoseReceiveIsPostedWhileItIsOnItsWay) {
  const auto last = receive(0, 1);
  for (int steps = 1; steps < 40; ++steps) {
    send(static_cast<std::uint64_t>(steps), 2, steps);
    for (int i = 0; i < steps; ++i) {
      advance(0);
      advance(1);
    }
    const auto received = receive(static_cast<std::uint64_t>(steps), 2);
    advance_until_ended(received);
    EXPECT_EQ(values(received), all(2, steps));
  }
  send(0, 1, 0);
  advance_until_ended(last);
}

TEST_F(NcclChannelTest, UsesTheMemoryOfEarlyMessagesAgain) {
  for (int round = 0; round < 3; ++round) {
    send(1, 100, round);
    send(2, 1, 0);
    advance_until_ended(receive(2, 1));
    const auto early = receive(1, 100);
    advance_until_ended(early);
    EXPECT_EQ(values(early), all(100, round));
  }
  // The headers and operands of both sides: 2 + 3 * 4; and once the memory of the early message.
  EXPECT_EQ(gpu_double().count_calls("cudaMalloc"), 2u + 12u + 1u);
}

TEST_F(NcclChannelTest, CarriesEmptyMessages) {
  const auto sent = send(3, 0, 0);
  const auto received = receive(3, 0);
  advance_until_ended(received);
  advance_until_ended(sent);
  EXPECT_EQ(gpu_double().count_calls("ncclSend"), 1u) << "the header alone";
}

TEST_F(NcclChannelTest, RaisesWhenTheSizesDifferAndGoesOnWithTheNextMessage) {
  send(1, 3, 1);
  send(1, 2, 2);
  const auto wrong = receive(1, 2);
  const auto right = receive(1, 2);
  advance_until_ended(right);
  EXPECT_EQ(values(right), all(2, 2));
  ASSERT_TRUE(wrong->ended);
  EXPECT_EQ(values(wrong), all(2, -1)) << "its operand was not touched";
  EXPECT_THAT(message_of<MismatchedCollective>([&] { std::rethrow_exception(wrong->error); }),
              AllOf(HasSubstr("receive of 2 int32 with tag 1 on rank 1 from rank 0"),
                    HasSubstr("the message has 3 elements of int32")));
}

TEST_F(NcclChannelTest, RaisesWhenAnEarlyMessageDoesNotFit) {
  send(1, 3, 1);
  send(2, 1, 2);
  advance_until_ended(receive(2, 1));
  const auto wrong = receive(1, 4);
  EXPECT_TRUE(wrong->ended);
  EXPECT_THROW(std::rethrow_exception(wrong->error), MismatchedCollective);
}

TEST_F(NcclChannelTest, TouchesOperandsOnlyAfterTheCallersWorkOnThem) {
  const DeviceGuard guard(*sides_[1].group->context().device);
  const auto held = gpu_double().hold(nullptr);
  const auto received = receive(1, 1);
  send(1, 1, 5);
  for (int i = 0; i < 100; ++i) {
    advance(0);
    advance(1);
  }
  EXPECT_EQ(values(received), all(1, -1));
  EXPECT_FALSE(received->ended);
  gpu_double().release(held);
  advance_until_ended(received);
  EXPECT_EQ(values(received), all(1, 5));
}

TEST_F(NcclChannelTest, ListsWhatHasNotEnded) {
  const auto sent = send(1, 1, 1);
  EXPECT_THAT(sides_[0].channel->pending(), ::testing::ElementsAre(sent));
  const auto received = receive(1, 1);
  EXPECT_THAT(sides_[1].channel->pending(), ::testing::ElementsAre(received));
  advance_until_ended(received);
  advance_until_ended(sent);
  EXPECT_THAT(sides_[0].channel->pending(), ::testing::IsEmpty());
  EXPECT_THAT(sides_[1].channel->pending(), ::testing::IsEmpty());
}

TEST_F(NcclChannelTest, PassesOnWhatNcclReports) {
  send(1, 1, 1);
  receive(1, 1);
  gpu_double().fail("ncclSend", 1, static_cast<int>(NcclResult::kSystemError));
  EXPECT_THROW(
      for (int i = 0; i < 1000; ++i) {
        advance(0);
        advance(1);
      },
      SystemFailure);
  sides_[0].channel->abort();
  sides_[1].channel->abort();
}

TEST_F(NcclChannelTest, RefusesAnIdThatIsNone) {
  store_->set("group/channel/0-1", "too short");
  receive(1, 1);
  EXPECT_THAT(message_of<PeerLost>([&] { advance(1); }), HasSubstr("from rank 0 to rank 1 has 9 bytes, expected 128"));
}

TEST_F(NcclChannelTest, APostingEndsOnce) {
  Posting posting(*sides_[0].group, {nullptr, 3, DType::kInt32}, 0, 4, Call(soon(), {}, "t.py:1"));
  EXPECT_EQ(posting.describe(), "3 int32 with tag 4 at t.py:1");
  EXPECT_FALSE(posting.ended);
  posting.end(std::make_exception_ptr(PeerLost("gone")));
  posting.end();
  EXPECT_TRUE(posting.ended);
  EXPECT_THROW(std::rethrow_exception(posting.error), PeerLost);
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
