#include "core/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <type_traits>

namespace accelerate_cpp {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(SystemFailures, NameTheCallTheErrorTextAndItsNumber) {
  const SystemFailure failure("opening the lid", ENOMEM);
  EXPECT_THAT(failure.what(), StartsWith("opening the lid: "));
  EXPECT_THAT(failure.what(), HasSubstr("Cannot allocate memory"));
  EXPECT_THAT(failure.what(), HasSubstr("(errno " + std::to_string(ENOMEM) + ")"));
  EXPECT_EQ(failure.error_number(), ENOMEM);
}

TEST(Errors, ThatCallersCanActOnShareOneFamily) {
  EXPECT_TRUE((std::is_base_of_v<Error, InvalidArgument>));
  EXPECT_TRUE((std::is_base_of_v<Error, Timeout>));
  EXPECT_TRUE((std::is_base_of_v<Error, PeerLost>));
  EXPECT_TRUE((std::is_base_of_v<Error, MismatchedCollective>));
  EXPECT_TRUE((std::is_base_of_v<Error, SystemFailure>));
  EXPECT_TRUE((std::is_base_of_v<std::runtime_error, Error>));
}

TEST(Errors, OfBrokenInvariantsAreNotCaughtWithThoseThatCallersCanActOn) {
  EXPECT_FALSE((std::is_base_of_v<Error, InternalError>));
  EXPECT_TRUE((std::is_base_of_v<std::exception, InternalError>));
}

TEST(Errors, KeepTheirMessage) {
  try {
    throw MismatchedCollective("rank 0: barrier");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 0: barrier");
  }
}

}  // namespace
}  // namespace accelerate_cpp
