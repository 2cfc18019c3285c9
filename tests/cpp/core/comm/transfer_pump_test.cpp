#include "core/comm/transfer_pump.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using testing::message_of;

constexpr milliseconds kAtOnce{0};
// The thread cares for nothing unless it is told to hurry.
constexpr milliseconds kNever = hours(10);

// A transfer whose peer is the test: it completes when it is moved on after arrive() or fail().
class FakeTransfer final : public Transfer {
 public:
  void arrive() { become(nullptr); }
  void fail(const std::string& why) { become(std::make_exception_ptr(PeerLost(why))); }

  bool poll() noexcept override {
    const std::lock_guard lock(mutex_);
    mover_ = ready_ && !ended_ ? std::this_thread::get_id() : mover_;
    ended_ = ended_ || ready_;
    return ended_;
  }
  void wait(Deadline deadline) override {
    ++waits;
    std::unique_lock lock(mutex_);
    while (!ready_) {
      if (changed_.wait_for(lock, std::min(deadline.remaining(), milliseconds(10))) == std::cv_status::timeout &&
          deadline.expired()) {
        throw Timeout("this wait is over");
      }
    }
    mover_ = ended_ ? mover_ : std::this_thread::get_id();
    ended_ = true;
    if (error_) {
      std::rethrow_exception(error_);
    }
  }
  int source() const override { return 3; }
  std::thread::id mover() {
    const std::lock_guard lock(mutex_);
    return mover_;
  }

  std::atomic<int> waits{0};

 private:
  void become(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      ready_ = true;
      error_ = std::move(error);
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread::id mover_;
};

// The next time that `pending` has ended.
std::future<void> end_of(Pending& pending) {
  const auto ended = std::make_shared<std::promise<void>>();
  pending.then([ended] { ended->set_value(); });
  return ended->get_future();
}

TEST(TransferPump, FinishesATransferThatIsCompleteFromTheStartAtOnce) {
  TransferPump pump;
  const auto transfer = std::make_shared<FakeTransfer>();
  transfer->arrive();
  int finished = 0;
  const auto pending = pump.post(transfer, [&] { ++finished; });
  EXPECT_TRUE(pending->ended());
  EXPECT_EQ(finished, 1);
  pending->wait(std::nullopt);
  EXPECT_EQ(finished, 1);
}

TEST(TransferPump, MovesOnOtherTransfersWhileACallbackWaitsForThem) {
  TransferPump pump(kAtOnce);
  const auto first = std::make_shared<FakeTransfer>();
  const auto second = std::make_shared<FakeTransfer>();
  const auto first_pending = pump.post(first, [] {});
  const auto second_pending = pump.post(second, [] {});
  std::promise<void> called;
  first_pending->then([&] {
    second->arrive();
    end_of(*second_pending).wait();
    const auto third = std::make_shared<FakeTransfer>();
    const auto third_pending = pump.post(third, [] {});
    third->arrive();
    end_of(*third_pending).wait();
    called.set_value();
  });
  first->arrive();
  called.get_future().wait();
}

TEST(TransferPump, MovesOnWhatNobodyWaitsForInAThreadOfItsOwn) {
  for (const milliseconds grace : {kAtOnce, TransferPump::kGrace}) {
    TransferPump pump(grace);
    std::vector<std::shared_ptr<FakeTransfer>> transfers;
    std::vector<std::future<void>> ends;
    std::vector<std::shared_ptr<Pending>> pending;
    for (int i = 0; i < 3; ++i) {
      transfers.push_back(std::make_shared<FakeTransfer>());
      pending.push_back(pump.post(transfers.back(), [] {}));
      ends.push_back(end_of(*pending.back()));
    }
    for (const int i : {2, 0, 1}) {  // in any order
      transfers[static_cast<std::size_t>(i)]->arrive();
      ends[static_cast<std::size_t>(i)].wait();
      EXPECT_NE(transfers[static_cast<std::size_t>(i)]->mover(), std::this_thread::get_id());
    }
  }
}

TEST(TransferPump, LeavesATransferToItsWaiter) {
  TransferPump pump(kNever);
  const auto transfer = std::make_shared<FakeTransfer>();
  std::thread::id finisher;
  const auto pending = pump.post(transfer, [&] { finisher = std::this_thread::get_id(); });
  transfer->arrive();
  pending->wait(std::nullopt);
  EXPECT_EQ(transfer->mover(), std::this_thread::get_id());
  EXPECT_EQ(finisher, std::this_thread::get_id());
}

TEST(TransferPump, MovesATransferOnThatIsPolled) {
  TransferPump pump(kNever);
  const auto transfer = std::make_shared<FakeTransfer>();
  bool finished = false;
  const auto pending = pump.post(transfer, [&] { finished = true; });
  EXPECT_FALSE(pending->poll());
  transfer->arrive();
  EXPECT_TRUE(pending->poll());
  EXPECT_TRUE(finished);
}

TEST(TransferPump, CaresForATransferThatIsToHurry) {
  TransferPump pump(kNever);
  const auto transfer = std::make_shared<FakeTransfer>();
  const auto pending = pump.post(transfer, [] {});
  auto end = end_of(*pending);
  pending->hurry();
  transfer->arrive();
  end.wait();
  EXPECT_NE(transfer->mover(), std::this_thread::get_id());
}

TEST(TransferPump, TellsEveryWaiterWhyATransferFailed) {
  TransferPump pump(kAtOnce);
  const auto transfer = std::make_shared<FakeTransfer>();
  bool finished = false;
  const auto pending = pump.post(transfer, [&] { finished = true; });
  auto end = end_of(*pending);
  transfer->fail("rank 3 is gone");
  end.wait();
  EXPECT_EQ(message_of<PeerLost>([&] { pending->wait(std::nullopt); }), "rank 3 is gone");
  EXPECT_EQ(message_of<PeerLost>([&] { pending->wait(std::nullopt); }), "rank 3 is gone");
  EXPECT_FALSE(finished);
}

TEST(TransferPump, MakesAFailureToFinishTheErrorOfTheTransfer) {
  TransferPump pump;
  const auto transfer = std::make_shared<FakeTransfer>();
  transfer->arrive();
  const auto pending = pump.post(transfer, [] { throw InvalidArgument("no room"); });
  EXPECT_EQ(message_of<InvalidArgument>([&] { pending->wait(std::nullopt); }), "no room");
}

TEST(TransferPump, GivesUpAWaitAtItsDeadlineAndLeavesTheTransferPosted) {
  TransferPump pump(kNever);
  const auto transfer = std::make_shared<FakeTransfer>();
  const auto pending = pump.post(transfer, [] {});
  EXPECT_THROW(pending->wait(Deadline::after(milliseconds(5))), Timeout);
  EXPECT_FALSE(pending->ended());
  transfer->arrive();
  pending->wait(Deadline::after(hours(1)));
  EXPECT_TRUE(pending->ended());
}

TEST(TransferPump, ReleasesWhatATransferNeededWhenItHasEnded) {
  TransferPump pump(kAtOnce);
  const auto transfer = std::make_shared<FakeTransfer>();
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  const auto pending = pump.post(transfer, [kept = std::move(held)] { EXPECT_EQ(*kept, 1); });
  EXPECT_FALSE(watched.expired());
  transfer->arrive();
  pending->wait(std::nullopt);
  // The thread may be the one that finished it, and lets go of it right afterwards.
  while (!watched.expired()) {
    std::this_thread::yield();
  }
}

TEST(TransferPump, KeepsWhatAPendingTransferNeedsEvenWithoutAPump) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  std::shared_ptr<FakeTransfer> transfer = std::make_shared<FakeTransfer>();
  {
    TransferPump pump;
    pump.post(transfer, [kept = std::move(held)] {});
  }
  EXPECT_FALSE(watched.expired()) << "the communicator may still write to it";
}

TEST(TransferPump, LetsPendingTransfersBeWaitedForOnceItIsStopped) {
  TransferPump pump(kAtOnce);
  const auto before = std::make_shared<FakeTransfer>();
  const auto pending = pump.post(before, [] {});
  pump.stop();
  pump.stop();
  const int waits = before->waits;
  before->arrive();
  pending->wait(std::nullopt);
  EXPECT_EQ(before->mover(), std::this_thread::get_id());
  EXPECT_GT(before->waits, waits);
  const auto after = std::make_shared<FakeTransfer>();
  const auto late = pump.post(after, [] {});
  after->arrive();
  late->wait(std::nullopt);
}

TEST(TransferPump, ConcludesATransferOnceHoweverManyThreadsLook) {
  TransferPump pump(kAtOnce);
  for (int round = 0; round < 200; ++round) {
    const auto transfer = std::make_shared<FakeTransfer>();
    std::atomic<int> finished{0};
    const auto pending = pump.post(transfer, [&] { ++finished; });
    std::vector<std::thread> threads;
    threads.emplace_back([&] { pending->wait(std::nullopt); });
    threads.emplace_back([&] {
      while (!pending->poll()) {
        std::this_thread::yield();
      }
    });
    transfer->arrive();
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(finished, 1);
  }
}

TEST(TransferPump, HoldsUpNothingInAForkedChild) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "the thread sanitizer supports no forks of threaded processes";
  }
  const auto transfer = std::make_shared<FakeTransfer>();
  auto pump = std::make_unique<TransferPump>(kAtOnce);
  const auto pending = pump->post(transfer, [] {});
  const pid_t child = ::fork();
  if (child == 0) {
    pending->hurry();
    pump->stop();
    pump.reset();
    ::_exit(pending->ended() ? 1 : 0);
  }
  EXPECT_EQ(testing::wait_process(child), 0);
  transfer->arrive();
  pending->wait(std::nullopt);
}

}  // namespace
}  // namespace accelerate_cpp::comm
