#include "xla_calls/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/base/error.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::xla_calls {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::shared_ptr<Group> alone() {
  return std::make_shared<Group>(std::make_shared<comm::SoloCommunicator>(), std::chrono::seconds(1),
                                 [](const std::exception_ptr& error) {
                                   try {
                                     std::rethrow_exception(error);
                                   } catch (const std::exception& found) {
                                     return std::string("another: ") + found.what();
                                   }
                                 });
}

TEST(Groups, AreFoundByTheirNumbersUntilTheyAreForgotten) {
  const std::shared_ptr<Group> first = alone();
  const std::shared_ptr<Group> second = alone();
  const std::int64_t number_of_first = register_group(first);
  const std::int64_t number_of_second = register_group(second);
  EXPECT_EQ(group_of(number_of_first), first);
  EXPECT_EQ(group_of(number_of_second), second);
  forget_group(number_of_first);
  EXPECT_THAT([&] { group_of(number_of_first); }, ThrowsMessage<InvalidArgument>(HasSubstr("compile the program")));
  EXPECT_EQ(group_of(number_of_second), second);
  forget_group(number_of_second);
}

TEST(Groups, LiveAsLongAsACallUsesThem) {
  std::weak_ptr<Group> watched;
  {
    const std::int64_t number = register_group(alone());
    const std::shared_ptr<Group> used = group_of(number);
    watched = used;
    forget_group(number);
    EXPECT_FALSE(watched.expired());
  }
  EXPECT_TRUE(watched.expired());
}

template <class Error>
std::string text_of(const Error& error) {
  return alone()->text_of(std::make_exception_ptr(error));
}

TEST(Groups, PutTheKindOfAnErrorBeforeItsText) {
  EXPECT_EQ(text_of(InvalidArgument("a")), "InvalidArgument: a");
  EXPECT_EQ(text_of(Timeout("b")), "Timeout: b");
  EXPECT_EQ(text_of(PeerLost("rank 1 died")), "PeerLost: rank 1 died");
  EXPECT_EQ(text_of(PeerLeft("rank 1 left")), "PeerLost: rank 1 left");
  EXPECT_EQ(text_of(MismatchedCollective("c")), "MismatchedCollective: c");
  EXPECT_THAT(text_of(SystemFailure("mmap", 12)), HasSubstr("SystemFailure: mmap"));
  EXPECT_EQ(text_of(InternalError("d")), "InternalError: d");
  EXPECT_EQ(text_of(std::runtime_error("e")), "another: e");
}

}  // namespace
}  // namespace accelerate_cpp::xla_calls
