#include "core/comm/service_threads.h"

#include <gtest/gtest.h>

#include <future>

namespace accelerate_cpp::comm {
namespace {

// Threads that end when the test does; the counts are those of the test alone.
class Started {
 public:
  std::function<void()> body() {
    return [this] { ++count_, done_.set_value(); };
  }
  void await() { done_.get_future().wait(); }
  int count() const { return count_; }

 private:
  int count_ = 0;
  std::promise<void> done_;
};

TEST(ServiceThreads, AreStartedOnce) {
  ServiceThreads threads;
  EXPECT_FALSE(threads.serving());
  Started first;
  threads.require("test", first.body());
  first.await();
  EXPECT_TRUE(threads.serving());
  EXPECT_FALSE(threads.surplus());
  Started second;
  threads.require("test", second.body());
  EXPECT_EQ(second.count(), 0);
}

TEST(ServiceThreads, AreReplacedWhileTheyAreHeldUpAndSomethingIsLeft) {
  ServiceThreads threads;
  Started first;
  threads.require("test", first.body());
  first.await();
  Started nothing_left;
  threads.hold_up(false, "test", nothing_left.body());
  EXPECT_FALSE(threads.serving());
  EXPECT_EQ(nothing_left.count(), 0);
  Started next;
  threads.require("test", next.body());
  next.await();
  EXPECT_TRUE(threads.serving());
  Started third;
  threads.hold_up(true, "test", third.body());
  third.await();
  EXPECT_TRUE(threads.serving());
  threads.resume();
  EXPECT_TRUE(threads.surplus());
  threads.end();
  EXPECT_FALSE(threads.surplus());
}

}  // namespace
}  // namespace accelerate_cpp::comm
