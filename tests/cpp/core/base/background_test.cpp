#include "core/base/background.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

namespace accelerate_cpp {
namespace {

TEST(BackgroundThread, RunsItsBodyUnderItsName) {
  std::promise<std::string> name;
  start_background_thread("accelerate-test", [&] {
    char text[16] = {};
    ::pthread_getname_np(::pthread_self(), text, sizeof(text));
    name.set_value(text);
  });
  EXPECT_EQ(name.get_future().get(), "accelerate-test");
}

TEST(BackgroundThread, LeavesSignalsToTheOtherThreads) {
  std::promise<bool> blocked;
  start_background_thread("accelerate-test", [&] {
    sigset_t mask;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked.set_value(sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1);
  });
  EXPECT_TRUE(blocked.get_future().get());
  sigset_t own;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &own);
  EXPECT_EQ(sigismember(&own, SIGINT), 0) << "the creator's mask is as it was";
}

TEST(BackgroundThread, IsAwaitedUntilItHasReleasedWhatItHeld) {
  std::promise<void> go;
  std::atomic<bool> released{false};
  std::shared_ptr<void> held(nullptr, [&](void*) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    released = true;
  });
  start_background_thread(
      "accelerate-test", [held = std::move(held), &go] { go.get_future().wait(); }, AtExit::kAwaited);
  go.set_value();
  await_background_threads();
  EXPECT_TRUE(released);
}

TEST(BackgroundThread, IsNotAwaitedInAForkedChildWhichDoesNotHaveIt) {
  std::promise<void> go;
  start_background_thread("accelerate-test", [&] { go.get_future().wait(); }, AtExit::kAwaited);
  const pid_t child = ::fork();
  if (child == 0) {
    await_background_threads();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  go.set_value();
  await_background_threads();
}

TEST(OwnerProcess, KnowsAChildThatWasForkedLater) {
  const OwnerProcess owner;
  EXPECT_FALSE(owner.forked());
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(owner.forked() && !OwnerProcess().forked() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ForkGeneration, IsAnotherInAChildAndStaysInTheParent) {
  const std::uint64_t own = fork_generation();
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(fork_generation() == own ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(fork_generation(), own);
}

TEST(ForkedChildren, AreToldWhyACommunicatorOfTheirParentIsNotTheirs) {
  EXPECT_STREQ(communicator_of_parent("broadcast", "rank 1").what(),
               "broadcast: this process was forked from rank 1, and its communicator did not come along; create a new "
               "group in the child");
}

}  // namespace
}  // namespace accelerate_cpp
