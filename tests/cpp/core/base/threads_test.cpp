#include "core/base/threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace accelerate_cpp {
namespace {

using std::chrono::milliseconds;

// A thread of this name that computes until it is told to wait, and waits until the end.
class Worker {
 public:
  explicit Worker(const char* name)
      : thread_([this, name] {
          ::pthread_setname_np(::pthread_self(), name);
          number_.set_value(::gettid());
          while (computes_.load()) {
          }
          end_.get_future().wait();
        }) {
    number = number_.get_future().get();
  }

  ~Worker() {
    wait();
    end_.set_value();
    thread_.join();
  }

  void wait() { computes_.store(false); }

  pid_t number = 0;

 private:
  std::atomic<bool> computes_{true};
  std::promise<pid_t> number_;
  std::promise<void> end_;
  std::thread thread_;
};

TEST(Threads, ThatComputeDoNotSleep) {
  Worker worker("test-worker");
  EXPECT_FALSE(thread_sleeps(worker.number));
  EXPECT_FALSE(await_sleep_of_threads("test-worker", milliseconds(20)));
}

TEST(Threads, AreAwaitedUntilTheyWait) {
  Worker worker("test-worker");
  auto asleep = std::async([] { return await_sleep_of_threads("test-worker", milliseconds(60000)); });
  EXPECT_EQ(asleep.wait_for(milliseconds(20)), std::future_status::timeout);
  worker.wait();
  EXPECT_TRUE(asleep.get());
  EXPECT_TRUE(thread_sleeps(worker.number));
}

TEST(Threads, OfOtherNamesAreNotAwaited) {
  const Worker worker("other-worker");
  EXPECT_TRUE(await_sleep_of_threads("test-worker", milliseconds(0)));
}

TEST(Threads, ThatHaveEndedSleep) {
  std::promise<pid_t> number;
  std::thread([&] { number.set_value(::gettid()); }).join();
  EXPECT_TRUE(thread_sleeps(number.get_future().get()));
}

}  // namespace
}  // namespace accelerate_cpp
