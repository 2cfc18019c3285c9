#include "core/comm/nccl/patience.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace accelerate_cpp::comm {
namespace {

TEST(Patience, AsksTheProbeAgainAndAgain) {
  int asked = 0;
  WaitHooks hooks;
  hooks.probe = [&] { ++asked; };
  Patience patience(Deadline::never(), hooks);
  while (asked < 3) {
    patience.pause();
  }
  EXPECT_GE(patience.waited(), std::chrono::milliseconds(100)) << "not at every look";
}

TEST(Patience, LetsThroughWhatTheProbeThrows) {
  WaitHooks hooks;
  hooks.probe = [] { throw std::runtime_error("Ctrl-C"); };
  Patience patience(Deadline::never(), hooks);
  EXPECT_THROW(while (true) { patience.pause(); }, std::runtime_error);
}

TEST(Patience, WarnsOnceWhenTheTimeHasCome) {
  WaitHooks hooks;
  hooks.warn_after = std::chrono::milliseconds(5);
  Patience patience(Deadline::never(), hooks);
  while (!patience.warn_now()) {
    patience.pause();
  }
  EXPECT_GE(patience.waited(), hooks.warn_after);
  EXPECT_FALSE(patience.warn_now());
}

TEST(Patience, DoesNotWarnBefore) {
  WaitHooks hooks;
  hooks.warn_after = std::chrono::hours(1);
  Patience patience(Deadline::never(), hooks);
  patience.pause();
  EXPECT_FALSE(patience.warn_now());
}

TEST(Patience, ExpiresWithItsDeadline) {
  const WaitHooks hooks;
  EXPECT_TRUE(Patience(Deadline::after(std::chrono::milliseconds(0)), hooks).expired());
  EXPECT_FALSE(Patience(Deadline::never(), hooks).expired());
}

}  // namespace
}  // namespace accelerate_cpp::comm
