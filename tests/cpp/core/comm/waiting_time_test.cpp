#include "core/comm/waiting_time.h"

#include <gtest/gtest.h>

#include <thread>

namespace accelerate_cpp::comm {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

void let_pass(std::chrono::nanoseconds time) {
  const auto until = steady_clock::now() + time;
  while (steady_clock::now() < until) {
  }
}

TEST(WaitingTime, CountsFromTheConstructionToTheEnd) {
  const auto before = time_waited();
  const auto began = steady_clock::now();
  {
    const Waiting waiting;
    let_pass(1ms);
    EXPECT_EQ(time_waited(), before);
  }
  EXPECT_GE(time_waited() - before, 1ms);
  EXPECT_LE(time_waited() - before, steady_clock::now() - began);
}

TEST(WaitingTime, CountsAWaitWithinAnotherOnce) {
  const auto before = time_waited();
  const auto began = steady_clock::now();
  {
    const Waiting outer;
    {
      const Waiting inner;
      let_pass(2ms);
    }
    EXPECT_EQ(time_waited(), before);
  }
  EXPECT_GE(time_waited() - before, 2ms);
  EXPECT_LE(time_waited() - before, steady_clock::now() - began);
}

TEST(WaitingTime, IsThatOfTheCallingThread) {
  const auto before = time_waited();
  std::chrono::nanoseconds of_other{-1};
  std::thread other([&] {
    {
      const Waiting waiting;
    }
    of_other = time_waited();
  });
  other.join();
  EXPECT_GE(of_other, 0ns);
  EXPECT_EQ(time_waited(), before);
}

}  // namespace
}  // namespace accelerate_cpp::comm
