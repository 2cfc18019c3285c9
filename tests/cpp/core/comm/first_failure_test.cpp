#include "core/comm/first_failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace accelerate_cpp::comm {
namespace {

using ::testing::StrEq;
using ::testing::ThrowsMessage;

TEST(FirstFailure, LetsEverythingPassUntilThereIsAReason) {
  const FirstFailure failure;
  EXPECT_FALSE(failure.reason().has_value());
  EXPECT_NO_THROW(failure.check("barrier", 1));
}

TEST(FirstFailure, KeepsTheFirstReason) {
  FirstFailure failure;
  EXPECT_TRUE(failure.set("the disk is full"));
  EXPECT_FALSE(failure.set("out of memory"));
  EXPECT_EQ(failure.reason(), "the disk is full");
  EXPECT_THAT([&] { failure.check("barrier", 1); },
              ThrowsMessage<PeerLost>(StrEq("barrier cannot run: the group has failed on rank 1: the disk is full")));
}

TEST(FirstFailure, CountsAReasonWithoutWords) {
  FirstFailure failure;
  failure.set("");
  EXPECT_THROW(failure.check("barrier", 1), PeerLost);
}

TEST(ReasonsInFlight, AreWhatTheExceptionSaysIfItSaysAnything) {
  const auto reason_of = [](const auto& thrown) {
    try {
      throw thrown;
    } catch (...) {
      return reason_in_flight("interrupted");
    }
  };
  EXPECT_EQ(reason_of(std::runtime_error("the disk is full")), "the disk is full");
  EXPECT_EQ(reason_of(std::runtime_error("")), "interrupted");
  EXPECT_EQ(reason_of(7), "interrupted");
}

}  // namespace
}  // namespace accelerate_cpp::comm
