#include "core/comm/call_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

CallRecord all_reduce_of(std::uint64_t count) {
  return {CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, -1, count};
}

// An all-gather over the store of run_threads(), which counts the bytes that a rank hands in.
class StoreAllGather {
 public:
  StoreAllGather(Store& store, int rank, int size) : store_(store), rank_(rank), size_(size) {}

  std::string operator()(const std::string& own) {
    const std::string round = std::to_string(++rounds) + "/";
    num_bytes += own.size();
    store_.set(round + std::to_string(rank_), own);
    std::string all;
    for (int r = 0; r < size_; ++r) {
      all += store_.get(round + std::to_string(r), testing::soon());
    }
    return all;
  }

  int rounds = 0;
  std::size_t num_bytes = 0;

 private:
  Store& store_;
  int rank_;
  int size_;
};

TEST(CallCheck, GathersSixteenBytesWhileAllIsWell) {
  testing::run_threads(3, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 3);
    CallCheck check(rank, {});
    check.check(all_reduce_of(5), testing::soon(), std::ref(all_gather));
    EXPECT_EQ(all_gather.rounds, 1);
    EXPECT_EQ(all_gather.num_bytes, 16u);
  });
}

TEST(CallCheck, GivesEveryRankTheTableOfAMismatch) {
  testing::run_threads(3, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 3);
    WaitHooks hooks;
    hooks.call_site = [rank] { return "train.py:" + std::to_string(10 + rank); };
    CallCheck check(rank, hooks);
    check.check(all_reduce_of(5), testing::soon(), std::ref(all_gather));
    const std::string message = message_of<MismatchedCollective>([&] {
      check.check(all_reduce_of(rank == 2 ? 8 : 6), Call(testing::soon(), {2, 3}, rank == 1 ? "eval.py:1" : ""),
                  std::ref(all_gather));
    });
    EXPECT_THAT(message, HasSubstr("operation #2"));
    EXPECT_THAT(message, HasSubstr("rank 0: all_reduce(sum) of [2, 3] float32 at train.py:10"));
    EXPECT_THAT(message, HasSubstr("rank 1: all_reduce(sum) of [2, 3] float32 at eval.py:1"));
    EXPECT_THAT(message, HasSubstr("rank 2: all_reduce(sum) of [2, 3] float32 at train.py:12"));
  });
}

TEST(CallCheck, CallsRanksByTheirNumbers) {
  testing::run_threads(2, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 2);
    WaitHooks hooks;
    hooks.numbers = {4, 6};
    CallCheck check(rank, hooks);
    const std::string message = message_of<MismatchedCollective>(
        [&] { check.check(all_reduce_of(rank == 1 ? 8 : 6), testing::soon(), std::ref(all_gather)); });
    EXPECT_THAT(message, HasSubstr("rank 4 and rank 6 ask for different operations"));
    EXPECT_THAT(message, HasSubstr("\n  rank 4: all_reduce"));
    EXPECT_THAT(message, HasSubstr("\n  rank 6: all_reduce"));
  });
}

TEST(CallCheck, ComparesShapes) {
  testing::run_threads(2, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 2);
    CallCheck check(rank, {});
    const Shape shape = rank == 0 ? Shape{2, 3} : Shape{3, 2};
    EXPECT_THAT(message_of<MismatchedCollective>(
                    [&] { check.check(all_reduce_of(6), Call(testing::soon(), shape), std::ref(all_gather)); }),
                HasSubstr("rank 1: all_reduce(sum) of [3, 2] float32"));
  });
}

TEST(CallCheck, ComparesWhatIsGivenWithWhatIsExpectedAndNotTheShapes) {
  testing::run_threads(2, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 2);
    CallCheck check(rank, {});
    const std::uint64_t own = rank == 0 ? 3 : 5;
    const Call call(testing::soon(), {static_cast<std::int64_t>(own)});
    const auto gather = [&](std::uint64_t from_0, std::uint64_t from_1) {
      return CallRecord{CallKind::kAllGather, DType::kInt8, ReduceOp::kSum, -1, own, {own, own}, {from_0, from_1}};
    };
    check.check(gather(3, 5), call, std::ref(all_gather));
    EXPECT_THAT(message_of<MismatchedCollective>(
                    [&] { check.check(gather(3, rank == 0 ? 4 : 5), call, std::ref(all_gather)); }),
                HasSubstr("disagree about a size"));
  });
}

CallRecord meeting_on(std::uint64_t topic) {
  CallRecord record{CallKind::kMeeting};
  record.count = topic;
  return record;
}

TEST(CallCheck, TellsThoseWhoMeetWhoTheyAreWhileTheOthersGoOnWithWhatTheyAskFor) {
  testing::run_threads(4, [](Store& store, int rank) {
    StoreAllGather all_gather(store, rank, 4);
    CallCheck check(rank, {});
    const auto agree = [&](const CallDigest& own) {
      std::string all = all_gather(std::string(reinterpret_cast<const char*>(&own), sizeof(own)));
      std::vector<CallDigest> digests(4);
      std::memcpy(digests.data(), all.data(), all.size());
      return fit_together(digests);
    };
    const auto ask = [&](const CallRecord& record) {
      return check.check(record, testing::soon(), agree, std::ref(all_gather));
    };
    EXPECT_TRUE(ask(meeting_on(5)).empty());  // all agree
    if (rank == 1 || rank == 3) {
      EXPECT_EQ(ask(meeting_on(5)), (std::vector<int>{1, 3}));
    }
    if (rank == 2) {  // at the same time, but a higher rank's
      EXPECT_EQ(ask(meeting_on(6)), std::vector<int>{2});
    }
    EXPECT_TRUE(ask(all_reduce_of(5)).empty());
    EXPECT_THROW(ask(all_reduce_of(static_cast<std::uint64_t>(rank))), MismatchedCollective);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
