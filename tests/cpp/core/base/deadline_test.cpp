#include "core/base/deadline.h"

#include <gtest/gtest.h>

#include <thread>

namespace accelerate_cpp {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(Deadlines, OfNoOrNegativeDurationHavePassed) {
  for (const milliseconds duration : {milliseconds(0), milliseconds(-1), milliseconds(hours(-1000))}) {
    const Deadline deadline = Deadline::after(duration);
    EXPECT_TRUE(deadline.expired());
    EXPECT_EQ(deadline.remaining(), milliseconds(0));
  }
}

TEST(Deadlines, PassOnceTheirDurationHasBeenWaited) {
  const Deadline deadline = Deadline::after(milliseconds(5));
  while (deadline.waited() < milliseconds(5)) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), milliseconds(0));
}

TEST(Deadlines, HaveNeverMoreTimeLeftThanTheyWereGiven) {
  const Deadline deadline = Deadline::after(hours(1000));
  EXPECT_FALSE(deadline.expired());
  const milliseconds first = deadline.remaining();
  EXPECT_LE(first, hours(1000));
  EXPECT_GT(first, milliseconds(0));
  EXPECT_LE(deadline.remaining(), first);
  EXPECT_GE(deadline.waited(), milliseconds(0));
}

TEST(Deadlines, AreRenewedWithAllTheTimeThatTheyWereGiven) {
  const Deadline passed = Deadline::after(milliseconds(1));
  while (!passed.expired()) {
    std::this_thread::yield();
  }
  EXPECT_LE(passed.renewed().remaining(), milliseconds(1));
  const milliseconds waited_anew = passed.renewed().waited();
  EXPECT_LT(waited_anew, passed.waited());
  EXPECT_GT(Deadline::after(hours(2)).renewed().remaining(), hours(1));
  EXPECT_FALSE(Deadline::never().renewed().expired());
}

TEST(Deadlines, ThatWouldOverflowTheClockNeverPass) {
  for (const milliseconds duration :
       {milliseconds::max(), milliseconds::max() / 2, milliseconds(hours(24 * 365 * 290))}) {
    const Deadline deadline = Deadline::after(duration);
    EXPECT_FALSE(deadline.expired());
    EXPECT_GT(deadline.remaining(), milliseconds(hours(24 * 365 * 100)));
  }
}

TEST(Deadlines, CanBeNever) {
  const Deadline deadline = Deadline::never();
  EXPECT_FALSE(deadline.expired());
  EXPECT_GT(deadline.remaining(), milliseconds(hours(24 * 365 * 100)));
  EXPECT_LT(deadline.waited(), deadline.remaining());
}

}  // namespace
}  // namespace accelerate_cpp
