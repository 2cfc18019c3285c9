#include "core/base/service_threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>

namespace accelerate_cpp {
namespace {

// A thread that tells that it was started, and may outlive the test.
class Started {
 public:
  std::function<void()> body() const {
    return [started = started_] { started->set_value(); };
  }
  void await() { future_.wait(); }
  bool has_started() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  const std::shared_ptr<std::promise<void>> started_ = std::make_shared<std::promise<void>>();
  const std::future<void> future_ = started_->get_future();
};

TEST(ServiceThreads, AreStartedOnce) {
  ServiceThreads threads("test", AtExit::kLeft);
  EXPECT_FALSE(threads.serving());
  Started first;
  threads.require(first.body());
  first.await();
  EXPECT_TRUE(threads.serving());
  EXPECT_FALSE(threads.surplus());
  Started second;
  threads.require(second.body());
  EXPECT_FALSE(second.has_started());
}

TEST(ServiceThreads, AreReplacedWhileTheyAreHeldUpAndSomethingIsLeft) {
  ServiceThreads threads("test", AtExit::kLeft);
  Started first;
  threads.require(first.body());
  first.await();
  Started nothing_left;
  threads.hold_up(false, nothing_left.body());
  EXPECT_FALSE(threads.serving());
  EXPECT_FALSE(nothing_left.has_started());
  Started next;
  threads.require(next.body());
  next.await();
  EXPECT_TRUE(threads.serving());
  Started third;
  threads.hold_up(true, third.body());
  third.await();
  EXPECT_TRUE(threads.serving());
  threads.resume();
  EXPECT_TRUE(threads.surplus());
  threads.end();
  EXPECT_FALSE(threads.surplus());
}

}  // namespace
}  // namespace accelerate_cpp
