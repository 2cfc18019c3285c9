#include "core/comm/arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::array<std::byte, 64> memory;

MemoryView view(std::size_t count, DType dtype) {
  return {memory.data(), count, dtype};
}

TEST(Arguments, AcceptEveryRankOfTheGroupAsRoot) {
  for (int root = 0; root < 3; ++root) {
    EXPECT_NO_THROW(check_root("broadcast", root, 3));
  }
}

TEST(Arguments, RefuseARootOutsideTheGroup) {
  for (const int root : {-1, 3, 1000}) {
    EXPECT_THAT([root] { check_root("broadcast", root, 3); },
                ThrowsMessage<InvalidArgument>(
                    AllOf(HasSubstr("broadcast"), HasSubstr("root " + std::to_string(root)), HasSubstr("group of 3"))));
  }
}

TEST(Arguments, RefuseAPeerThatIsNotAnotherRank) {
  EXPECT_NO_THROW(check_peer("send", 2, 1, 3));
  for (const int peer : {-1, 1, 3}) {
    EXPECT_THAT([peer] { check_peer("send", peer, 1, 3); },
                ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("send"), HasSubstr("rank " + std::to_string(peer)))));
  }
}

TEST(Arguments, AcceptOneTensorPerRankOfWhateverSizes) {
  const std::vector<MemoryView> outputs = {view(4, DType::kInt16), view(0, DType::kInt16)};
  const std::vector<ConstMemoryView> inputs(outputs.begin(), outputs.end());
  EXPECT_NO_THROW(check_parts("gather", "output", outputs, DType::kInt16, 2));
  EXPECT_NO_THROW(check_parts("scatter", "input", inputs, DType::kInt16, 2));
}

TEST(Arguments, RefuseMoreOrFewerTensorsThanRanks) {
  const MemoryView one = view(4, DType::kInt16);
  EXPECT_THAT(
      [&] { check_parts("gather", "output", std::vector<MemoryView>{one}, DType::kInt16, 2); },
      ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("gather"), HasSubstr("expected 2 output"), HasSubstr("found 1"))));
  EXPECT_THROW(check_parts("gather", "output", std::vector<MemoryView>{one, one, one}, DType::kInt16, 2),
               InvalidArgument);
  EXPECT_THROW(check_parts("scatter", "input", std::vector<ConstMemoryView>{}, DType::kInt16, 2), InvalidArgument);
}

TEST(Arguments, NameTheRankWhoseTensorHasAnotherDTypeEvenOfTheSameSizeInBytes) {
  const std::vector<MemoryView> outputs = {view(4, DType::kInt16), view(4, DType::kFloat16)};
  EXPECT_THAT([&] { check_parts("gather", "output", outputs, DType::kInt16, 2); },
              ThrowsMessage<InvalidArgument>(AllOf(
                  HasSubstr("gather"), HasSubstr("output tensor for rank 1 is float16"), HasSubstr("expected int16"))));
  const std::vector<ConstMemoryView> inputs(outputs.begin(), outputs.end());
  EXPECT_THAT([&] { check_parts("scatter", "input", inputs, DType::kFloat16, 2); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("scatter"), HasSubstr("input tensor for rank 0 is int16"),
                                                   HasSubstr("expected float16"))));
}

TEST(Arguments, RefuseTensorsOnARankThatIsNotTheRoot) {
  EXPECT_NO_THROW(check_no_parts("gather", "output", 0, 2));
  EXPECT_THAT([] { check_no_parts("gather", "output", 3, 2); },
              ThrowsMessage<InvalidArgument>(
                  AllOf(HasSubstr("gather"), HasSubstr("output"), HasSubstr("3"), HasSubstr("root"), HasSubstr("2"))));
}

TEST(Arguments, RefuseAnOutputThatDoesNotFitItsInput) {
  EXPECT_NO_THROW(check_counts_equal("all_gather", view(4, DType::kInt16), view(4, DType::kInt16)));
  EXPECT_THAT([] { check_counts_equal("all_gather", view(4, DType::kInt16), view(5, DType::kInt16)); },
              ThrowsMessage<InvalidArgument>(
                  AllOf(HasSubstr("all_gather"), HasSubstr("output of 5 elements"), HasSubstr("input of 4"))));
}

}  // namespace
}  // namespace accelerate_cpp::comm
