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

TEST(Arguments, AcceptOneEqualTensorPerRank) {
  const MemoryView one = view(4, DType::kInt16);
  EXPECT_NO_THROW(check_per_rank("gather", one, std::vector<MemoryView>{one, one}, 2));
  EXPECT_NO_THROW(check_per_rank("scatter", one, std::vector<ConstMemoryView>{one, one}, 2));
}

TEST(Arguments, RefuseMoreOrFewerTensorsThanRanks) {
  const MemoryView one = view(4, DType::kInt16);
  EXPECT_THAT(
      [&] { check_per_rank("gather", one, std::vector<MemoryView>{one}, 2); },
      ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("gather"), HasSubstr("expected 2"), HasSubstr("found 1"))));
  EXPECT_THROW(check_per_rank("gather", one, std::vector<MemoryView>{one, one, one}, 2), InvalidArgument);
  EXPECT_THROW(check_per_rank("scatter", one, std::vector<ConstMemoryView>{}, 2), InvalidArgument);
}

TEST(Arguments, NameTheRankWhoseTensorHasAnotherSize) {
  const std::vector<ConstMemoryView> per_rank = {view(4, DType::kInt16), view(5, DType::kInt16)};
  EXPECT_THAT([&] { check_per_rank("scatter", view(4, DType::kInt16), per_rank, 2); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("scatter"), HasSubstr("rank 1 has 5 elements of int16"),
                                                   HasSubstr("expected 4 of int16"))));
}

TEST(Arguments, NameTheRankWhoseTensorHasAnotherDTypeEvenOfTheSameSizeInBytes) {
  const std::vector<MemoryView> per_rank = {view(4, DType::kInt16), view(4, DType::kFloat16)};
  EXPECT_THAT([&] { check_per_rank("gather", view(4, DType::kInt16), per_rank, 2); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("rank 1 has 4 elements of float16"))));
}

}  // namespace
}  // namespace accelerate_cpp::comm
