#include "torch_bridge/c10d_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using ::c10d::OpType;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::message_of;

// Ends when the test says so.
class Manual final : public Pending {
 public:
  void wait(const std::optional<Deadline>& deadline) override {
    if (!ended() && deadline) {
      throw Timeout("this wait is over");
    }
    rethrow_error();
  }
  void hurry() noexcept override { hurried = true; }
  void finish(std::exception_ptr error = nullptr) {
    for (const Callback& callback : mark_ended(std::move(error))) {
      callback();
    }
  }
  bool hurried = false;
};

class FromRankFive final : public Transfer {
 public:
  bool poll() noexcept override { return true; }
  void wait(Deadline) override {}
  int source() const override { return 5; }
};

const Rethrow kAsItIs = [] { throw; };

std::exception_ptr lost() {
  return std::make_exception_ptr(PeerLost("rank 1 is gone"));
}

struct Work {
  std::shared_ptr<Manual> pending = std::make_shared<Manual>();
  Tensors results = {at::ones({2})};
  WorkPointer work = pending_work(OpType::ALLREDUCE, 7, results, pending, nullptr, kAsItIs);
};

TEST(CompletedWork, HasTheResultsFromTheStart) {
  const Tensors results = {at::ones({2})};
  const WorkPointer work = completed_work(OpType::BROADCAST, 3, results);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_EQ(work->exception(), nullptr);
  EXPECT_TRUE(work->wait(milliseconds(1)));
  EXPECT_EQ(work->getSequencenumber(), 3u);
  EXPECT_EQ(work->retrieveOpType(), OpType::BROADCAST);
  EXPECT_TRUE(work->result().at(0).is_same(results[0]));
  const auto future = work->getFuture();
  ASSERT_TRUE(future->completed());
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(results[0]));
}

TEST(PendingWork, IsUnderWayUntilItEnds) {
  Work under_way;
  EXPECT_FALSE(under_way.work->isCompleted());
  EXPECT_FALSE(under_way.work->isSuccess());
  EXPECT_THAT(message_of<InvalidArgument>([&] { under_way.work->result(); }), HasSubstr("call wait() first"));
  EXPECT_THROW(under_way.work->wait(milliseconds(1)), Timeout);
  under_way.pending->finish();
  EXPECT_TRUE(under_way.work->isCompleted());
  EXPECT_TRUE(under_way.work->isSuccess());
  EXPECT_TRUE(under_way.work->wait(milliseconds(1)));
  under_way.work->synchronize();
  EXPECT_TRUE(under_way.work->result().at(0).is_same(under_way.results[0]));
  EXPECT_EQ(under_way.work->getSequencenumber(), 7u);
}

TEST(PendingWork, RaisesWhyItFailed) {
  Work under_way;
  const auto future = under_way.work->getFuture();
  under_way.pending->finish(lost());
  EXPECT_TRUE(under_way.work->isCompleted());
  EXPECT_FALSE(under_way.work->isSuccess());
  EXPECT_EQ(message_of<PeerLost>([&] { under_way.work->wait(); }), "rank 1 is gone");
  EXPECT_EQ(message_of<PeerLost>([&] { std::rethrow_exception(under_way.work->exception()); }), "rank 1 is gone");
  EXPECT_EQ(message_of<PeerLost>([&] { future->waitAndThrow(); }), "rank 1 is gone");
}

TEST(PendingWork, TranslatesEveryErrorThatItHandsOut) {
  const auto pending = std::make_shared<Manual>();
  const Rethrow translate = [] {
    try {
      throw;
    } catch (const PeerLost& error) {
      throw std::range_error(std::string("translated: ") + error.what());
    }
  };
  const WorkPointer work = pending_work(OpType::ALLREDUCE, 1, {}, pending, nullptr, translate);
  const auto future = work->getFuture();
  pending->finish(lost());
  EXPECT_EQ(message_of<std::range_error>([&] { work->wait(); }), "translated: rank 1 is gone");
  EXPECT_THROW(std::rethrow_exception(work->exception()), std::range_error);
  EXPECT_THROW(future->waitAndThrow(), std::range_error);
}

TEST(PendingWork, HasOneFutureThatEndsWithItAndMakesItHurry) {
  Work under_way;
  EXPECT_FALSE(under_way.pending->hurried);
  const auto future = under_way.work->getFuture();
  EXPECT_TRUE(under_way.pending->hurried);
  EXPECT_EQ(future, under_way.work->getFuture());
  bool called = false;
  future->addCallback([&](c10::ivalue::Future& ended) { called = ended.completed(); });
  EXPECT_FALSE(future->completed());
  under_way.pending->finish();
  EXPECT_TRUE(called);
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(under_way.results[0]));
}

TEST(PendingWork, MayBeDroppedBeforeItEnds) {
  Work under_way;
  const auto future = under_way.work->getFuture();
  const at::Tensor result = under_way.results[0];
  under_way.results.clear();
  under_way.work.reset();
  under_way.pending->finish();
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(result));
}

TEST(PendingWork, KnowsWhereAMessageCameFrom) {
  const auto pending = std::make_shared<Manual>();
  const WorkPointer work =
      pending_work(OpType::RECVANYSOURCE, 0, {}, pending, std::make_shared<FromRankFive>(), kAsItIs);
  EXPECT_EQ(work->sourceRank(), 5);
}

TEST(FailedWork, RaisesAtEveryOccasion) {
  const WorkPointer work = failed_work(OpType::SEND, lost());
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_THROW(work->wait(), PeerLost);
  EXPECT_THROW(std::rethrow_exception(work->exception()), PeerLost);
  EXPECT_THROW(work->getFuture()->waitAndThrow(), PeerLost);
}

TEST(CoalescedWork, EndsWhenAllOfItsPartsHave) {
  Work first;
  Work second;
  const WorkPointer all = coalesced_work({first.work, second.work});
  const auto future = all->getFuture();
  second.pending->finish();
  EXPECT_FALSE(all->isCompleted());
  EXPECT_FALSE(future->completed());
  EXPECT_THROW(all->wait(milliseconds(1)), Timeout);
  first.pending->finish();
  EXPECT_TRUE(all->isCompleted());
  EXPECT_TRUE(all->isSuccess());
  EXPECT_TRUE(all->wait());
  ASSERT_EQ(all->result().size(), 2u);
  EXPECT_TRUE(all->result()[1].is_same(second.results[0]));
  ASSERT_TRUE(future->completed());
  EXPECT_EQ(future->value().toTensorVector().size(), 2u);
}

TEST(CoalescedWork, FailsWhenOneOfItsPartsHas) {
  Work first;
  Work second;
  const WorkPointer all = coalesced_work({first.work, second.work});
  const auto future = all->getFuture();
  first.pending->finish();
  second.pending->finish(lost());
  EXPECT_TRUE(all->isCompleted());
  EXPECT_FALSE(all->isSuccess());
  EXPECT_THROW(all->wait(), PeerLost);
  EXPECT_THROW(std::rethrow_exception(all->exception()), PeerLost);
  EXPECT_THROW(future->waitAndThrow(), PeerLost);
}

TEST(CoalescedWork, OfNothingIsComplete) {
  const WorkPointer nothing = coalesced_work({});
  EXPECT_TRUE(nothing->isCompleted());
  EXPECT_TRUE(nothing->wait());
  EXPECT_TRUE(nothing->getFuture()->completed());
}

}  // namespace
}  // namespace accelerate_cpp::comm
