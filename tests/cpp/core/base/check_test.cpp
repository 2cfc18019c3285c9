#include "core/base/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace accelerate_cpp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Check, LetsWhatHoldsPass) {
  EXPECT_NO_THROW(ACCELERATE_CHECK(1 + 1 == 2, "arithmetic"));
}

TEST(Check, NamesTheFileTheConditionAndTheMessage) {
  const int found = 3;
  EXPECT_THAT([&] { ACCELERATE_CHECK(found == 4, "found " + std::to_string(found)); },
              ThrowsMessage<InternalError>(
                  AllOf(HasSubstr("check_test.cpp:"), HasSubstr("found == 4 does not hold"), HasSubstr("found 3"))));
}

TEST(Check, EvaluatesItsConditionOnce) {
  int evaluations = 0;
  ACCELERATE_CHECK(++evaluations > 0, "counted");
  EXPECT_EQ(evaluations, 1);
}

TEST(Check, BuildsItsMessageOnlyForAFailure) {
  bool built = false;
  const auto message = [&built] {
    built = true;
    return std::string("built");
  };
  ACCELERATE_CHECK(!built, message());
  EXPECT_FALSE(built);
}

TEST(Check, IsOneStatement) {
  if (false)
    ACCELERATE_CHECK(false, "not reached");
  else
    SUCCEED();
}

}  // namespace
}  // namespace accelerate_cpp
