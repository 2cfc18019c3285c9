#include "core/comm/work_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/base/background.h"
#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

constexpr milliseconds kAtOnce{0};
// The thread takes up nothing unless it is told to hurry.
constexpr milliseconds kNever = hours(10);

std::exception_ptr closed() {
  return std::make_exception_ptr(PeerLost("the queue was stopped"));
}

TEST(WorkQueue, LetsTheWaiterRunWhatWasIssuedBeforeInOrder) {
  WorkQueue queue([] {}, kNever);
  std::vector<std::pair<int, std::thread::id>> runs;
  std::vector<std::shared_ptr<Pending>> tasks;
  for (int i = 0; i < 4; ++i) {
    tasks.push_back(queue.issue([&runs, i] { runs.emplace_back(i, std::this_thread::get_id()); }));
  }
  tasks[2]->wait(std::nullopt);
  const std::thread::id own = std::this_thread::get_id();
  EXPECT_THAT(runs, ElementsAre(std::pair(0, own), std::pair(1, own), std::pair(2, own)));
  EXPECT_FALSE(tasks[3]->poll()) << "what was issued later is left alone";
  queue.drain();
  EXPECT_TRUE(tasks[3]->poll());
}

TEST(WorkQueue, RunsWhatNobodyWaitsForInAThreadOfItsOwn) {
  for (const milliseconds grace : {kAtOnce, WorkQueue::kGrace}) {
    WorkQueue queue([] {}, grace);
    std::promise<std::thread::id> runner;
    queue.issue([&] { runner.set_value(std::this_thread::get_id()); });
    EXPECT_NE(runner.get_future().get(), std::this_thread::get_id());
  }
}

TEST(WorkQueue, KeepsNoProgramFromEndingWhereItsTasksNeedNoInterpreter) {
  WorkQueue queue([] {}, kAtOnce, AtExit::kLeft);
  queue.issue([] {})->wait(std::nullopt);
  await_background_threads();  // the thread of the queue waits for more
  queue.issue([] {})->wait(std::nullopt);
}

TEST(WorkQueue, ServesOtherTasksWhileACallbackWaitsForThem) {
  constexpr int kDepth = 4;
  WorkQueue queue([] {}, kAtOnce);
  std::promise<void> all;
  // Each task has a callback that issues the next one and returns only when that one's callback has.
  std::function<void(int)> issue_from = [&](int level) {
    if (level == kDepth) {
      all.set_value();
      return;
    }
    const auto next = std::make_shared<std::promise<void>>();
    queue.issue([] {})->then([&issue_from, next, level] {
      issue_from(level + 1);
      next->set_value();
    });
    next->get_future().wait();
  };
  issue_from(0);
  all.get_future().wait();
}

TEST(WorkQueue, ServesTasksThatWaitedAlreadyWhenACallbackBegan) {
  WorkQueue queue([] {}, kNever);
  std::promise<void> second_ran;
  std::promise<void> called;
  const auto first = queue.issue([] {});
  first->then([&] {
    second_ran.get_future().wait();
    called.set_value();
  });
  const auto second = queue.issue([&] { second_ran.set_value(); });
  second->hurry();
  called.get_future().wait();
}

TEST(WorkQueue, IsStoppedWhenACallbackThatWaitsForAFailedTaskHasReturned) {
  WorkQueue queue([] {}, kNever);
  std::promise<void> begun;
  std::atomic<bool> returned{false};
  const auto first = queue.issue([] {});
  first->then([&] {
    const auto second = queue.issue([] {});
    std::promise<void> failed;
    second->then([&] { failed.set_value(); });
    begun.set_value();
    failed.get_future().wait();
    returned = true;
  });
  first->hurry();
  begun.get_future().wait();
  queue.stop(closed());
  EXPECT_TRUE(returned);
  EXPECT_THROW(queue.issue([] {}), PeerLost);
}

TEST(WorkQueue, RunsATaskThatIsToHurryAndThoseBeforeIt) {
  WorkQueue queue([] {}, kNever);
  std::promise<void> first;
  std::promise<void> second;
  queue.issue([&] { first.set_value(); });
  const auto task = queue.issue([&] { second.set_value(); });
  const auto later = queue.issue([] {});
  task->hurry();
  first.get_future().wait();
  second.get_future().wait();
  EXPECT_FALSE(later->ended());
  later->wait(std::nullopt);
}

TEST(WorkQueue, NeverRunsTwoTasksAtOnceAndKeepsTheirOrder) {
  WorkQueue queue;
  std::atomic<int> inside{0};
  std::vector<int> order;
  std::vector<std::shared_ptr<Pending>> tasks;
  for (int i = 0; i < 2000; ++i) {
    tasks.push_back(queue.issue([&, i] {
      EXPECT_EQ(inside.fetch_add(1), 0);
      order.push_back(i);
      inside.fetch_sub(1);
    }));
  }
  std::vector<std::thread> waiters;
  for (std::size_t w = 0; w < 3; ++w) {
    waiters.emplace_back([&, w] {
      for (std::size_t i = w; i < tasks.size(); i += 3) {
        tasks[i]->wait(std::nullopt);
        EXPECT_TRUE(tasks[i]->ended());
      }
    });
  }
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  ASSERT_EQ(order.size(), tasks.size());
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(WorkQueue, DrainsWithoutTheExceptionsOfTheOperations) {
  WorkQueue queue([] {}, kNever);
  queue.drain();
  const auto failed = queue.issue([] { throw PeerLost("rank 1 is gone"); });
  bool ran = false;
  queue.issue([&] { ran = true; });
  queue.drain();
  EXPECT_TRUE(ran);
  EXPECT_EQ(message_of<PeerLost>([&] { failed->wait(std::nullopt); }), "rank 1 is gone");
  EXPECT_EQ(message_of<PeerLost>([&] { failed->wait(std::nullopt); }), "rank 1 is gone");
}

struct Interrupt {};

TEST(WorkQueue, RaisesAnInterruptInTheThreadThatHelped) {
  WorkQueue queue([] {}, kNever);
  const auto interrupted = queue.issue([] { throw Interrupt(); });
  const auto later = queue.issue([] {});
  EXPECT_THROW(later->wait(std::nullopt), Interrupt);
  EXPECT_FALSE(later->ended());
  EXPECT_THROW(interrupted->wait(std::nullopt), Interrupt);
  later->wait(std::nullopt);
  queue.issue([] { throw Interrupt(); });
  queue.issue([] {});
  EXPECT_THROW(queue.drain(), Interrupt);
}

TEST(WorkQueue, AsksTheProbeWhileSomebodyElseRunsTheTask) {
  std::promise<void> release;
  WorkQueue queue([] { throw Interrupt(); }, kAtOnce);
  std::promise<void> begun;
  const auto task = queue.issue([&] {
    begun.set_value();
    release.get_future().wait();
  });
  begun.get_future().wait();
  EXPECT_THROW(task->wait(std::nullopt), Interrupt);
  EXPECT_THROW(queue.drain(), Interrupt);
  release.set_value();
  while (!task->poll()) {
    std::this_thread::yield();
  }
  task->wait(std::nullopt);
}

TEST(WorkQueue, GivesUpAWaitAtItsDeadlineAndLeavesTheTaskUnderWay) {
  WorkQueue queue([] {}, kNever);
  std::promise<void> release;
  const auto task = queue.issue([&] { release.get_future().wait(); });
  const auto wait = [&] { task->wait(Deadline::after(milliseconds(20))); };
  EXPECT_THAT(message_of<Timeout>(wait), HasSubstr("it goes on, and can be waited for again"));
  EXPECT_FALSE(task->ended());
  release.set_value();
  task->wait(Deadline::never());
  EXPECT_TRUE(task->ended());
}

TEST(WorkQueue, ReleasesWhatATaskHoldsBeforeItEnds) {
  for (const milliseconds grace : {kAtOnce, kNever}) {
    WorkQueue queue([] {}, grace);
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = held;
    const auto task = queue.issue([kept = std::move(held)] { EXPECT_EQ(*kept, 1); });
    EXPECT_FALSE(grace == kNever && watched.expired());
    task->wait(std::nullopt);
    EXPECT_TRUE(watched.expired());
  }
}

TEST(WorkQueue, CallsBackOutsideOfItsLocks) {
  WorkQueue queue([] {}, kNever);
  const auto task = queue.issue([] {});
  bool nested = false;
  task->then([&] {
    queue.issue([&] { nested = true; });
    queue.drain();
  });
  task->wait(std::nullopt);
  EXPECT_TRUE(nested);
}

TEST(WorkQueue, StopsAfterTheRunningTaskAndFailsTheOthers) {
  WorkQueue queue([] {}, kAtOnce);
  std::promise<void> release;
  std::promise<void> begun;
  const auto running = queue.issue([&] {
    begun.set_value();
    release.get_future().wait();
  });
  begun.get_future().wait();
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  const auto waiting = queue.issue([kept = std::move(held)] { FAIL() << "must not run"; });
  std::promise<bool> told;
  waiting->then([&] { told.set_value(waiting->error() != nullptr); });
  std::thread helper([&] { EXPECT_THROW(waiting->wait(std::nullopt), PeerLost); });
  std::thread stopper([&] { queue.stop(closed()); });
  while (message_of<PeerLost>([&] { queue.issue([] {}); }) != "the queue was stopped") {
    std::this_thread::yield();
  }
  EXPECT_FALSE(running->ended());
  release.set_value();
  stopper.join();
  helper.join();
  EXPECT_TRUE(running->ended());
  EXPECT_EQ(running->error(), nullptr);
  EXPECT_TRUE(told.get_future().get());
  EXPECT_TRUE(watched.expired());
}

TEST(WorkQueue, RefusesWorkOnceItIsStopped) {
  WorkQueue queue;
  queue.stop(closed());
  queue.stop(std::make_exception_ptr(Timeout("the first reason stays")));
  EXPECT_EQ(message_of<PeerLost>([&] { queue.issue([] {}); }), "the queue was stopped");
  EXPECT_EQ(message_of<PeerLost>([&] { queue.drain(); }), "the queue was stopped");
}

TEST(WorkQueue, MayBeStoppedFromWithinItsOwnThread) {
  WorkQueue queue([] {}, kNever);
  std::promise<void> stopped;
  const auto task = queue.issue([] {});
  task->then([&] {
    queue.stop(closed());
    stopped.set_value();
  });
  task->hurry();
  stopped.get_future().wait();
}

TEST(WorkQueue, LetsItsThreadFinishWhatIsLeftWhenItIsDestroyed) {
  std::promise<std::thread::id> runner;
  std::shared_ptr<Pending> task;
  {
    WorkQueue queue([] {}, kNever);
    task = queue.issue([&] { runner.set_value(std::this_thread::get_id()); });
  }
  EXPECT_NE(runner.get_future().get(), std::this_thread::get_id());
  task->wait(std::nullopt);
}

TEST(WorkQueue, GoesOnAfterAnIdleTime) {
  WorkQueue queue([] {}, milliseconds(1));
  for (const milliseconds pause : {milliseconds(0), milliseconds(5), milliseconds(60)}) {
    std::promise<void> ran;
    std::promise<void> never;
    EXPECT_EQ(never.get_future().wait_for(pause), std::future_status::timeout);
    queue.issue([&] { ran.set_value(); });
    ran.get_future().wait();
  }
}

TEST(WorkQueue, RefusesToWorkInAForkedChild) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "the thread sanitizer supports no forks of threaded processes";
  }
  WorkQueue queue([] {}, kNever);
  // A thread that is just being started holds locks of the address sanitizer, which a child would wait for in vain.
  std::promise<void> begun;
  queue.issue([&] { begun.set_value(); })->hurry();
  begun.get_future().wait();
  const auto task = queue.issue([] {});
  const auto refusal = [](const auto& action) {
    return message_of<InvalidArgument>(action).find("this process was forked off") != std::string::npos;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    bool refused = refusal([&] { task->wait(std::nullopt); }) && refusal([&] { queue.drain(); }) &&
                   refusal([&] { queue.issue([] {}); });
    {
      WorkQueue own;
      own.issue([] {})->wait(std::nullopt);  // a queue of the child's own works
      refused = refused && !task->poll();
    }
    queue.stop(closed());
    queue.~WorkQueue();
    ::_exit(refused ? 0 : 1);
  }
  EXPECT_EQ(testing::wait_process(child), 0);
  task->wait(std::nullopt);
}

}  // namespace
}  // namespace accelerate_cpp::comm
