#include "torch_bridge/tensor_list.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

at::Tensor counting(std::int64_t rows, std::int64_t columns) {
  return at::arange(rows * columns, at::kFloat).view({rows, columns});
}

template <class View>
std::vector<float> values(const View& view) {
  const auto* const data = static_cast<const float*>(view.data);
  return {data, data + view.count};
}

TEST(TensorList, TreatsEachTensorByItsStrides) {
  const at::Tensor plain = counting(1, 2);
  const at::Tensor base = counting(2, 2);
  TensorList list({plain, base.t()}, Use::kCompute);
  const std::vector<ConstMemoryView> views = list.load();
  EXPECT_EQ(views[0].data, plain.data_ptr());
  EXPECT_THAT(values(views[1]), ElementsAre(0, 2, 1, 3));
  const std::vector<MemoryView> room = list.reserve();
  static_cast<float*>(room[1].data)[1] = 20;
  list.store();
  EXPECT_EQ(base[1][0].item<float>(), 20);
}

TEST(TensorList, KnowsWhetherAllHaveACount) {
  EXPECT_TRUE(TensorList({counting(1, 2), counting(2, 1)}, Use::kMove).all_have(2));
  EXPECT_FALSE(TensorList({counting(1, 2), counting(2, 2)}, Use::kMove).all_have(2));
  EXPECT_TRUE(TensorList({at::empty({1}, at::kComplexFloat)}, Use::kMove).all_have(2)) << "a complex number is a pair";
}

TEST(Rows, AreCutIntoEqualPartsWithoutSizes) {
  Rows rows("operation", counting(4, 2), {}, 2);
  const std::vector<ConstMemoryView> parts = rows.load();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_THAT(values(parts[1]), ElementsAre(4, 5, 6, 7));
}

TEST(Rows, AreCutIntoTheSizesGivenNoneIncluded) {
  Rows rows("operation", counting(3, 2), {0, 2, 1}, 3);
  const std::vector<ConstMemoryView> parts = rows.load();
  EXPECT_EQ(parts[0].count, 0u);
  EXPECT_THAT(values(parts[1]), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(values(parts[2]), ElementsAre(4, 5));
}

TEST(Rows, OfATensorWithoutElementsAreEmpty) {
  Rows rows("operation", at::empty({0, 3}, at::kFloat), {}, 2);
  EXPECT_EQ(rows.reserve()[1].count, 0u);
  Rows narrow("operation", at::empty({4, 0}, at::kFloat), {1, 3}, 2);
  EXPECT_EQ(narrow.reserve()[1].count, 0u);
}

TEST(Rows, WriteHomeToAnyStrides) {
  const at::Tensor base = counting(2, 2);
  Rows rows("operation", base.t(), {}, 2);
  const std::vector<MemoryView> parts = rows.reserve();
  static_cast<float*>(parts[0].data)[0] = 10;
  static_cast<float*>(parts[0].data)[1] = 11;
  static_cast<float*>(parts[1].data)[0] = 12;
  static_cast<float*>(parts[1].data)[1] = 13;
  rows.store();
  EXPECT_EQ(base[1][0].item<float>(), 11);
  EXPECT_EQ(base[0][1].item<float>(), 12);
}

TEST(Rows, RefuseSizesThatDoNotFit) {
  EXPECT_THAT(refusal([] { Rows("all_to_all_single", counting(3, 1), {}, 2); }),
              AllOf(HasSubstr("all_to_all_single: "), HasSubstr("size 3 cannot be divided evenly among 2 ranks")));
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{3}, {1, 1}, {4, -1}, {1, 1, 1}}) {
    EXPECT_THAT(refusal([&] { Rows("operation", counting(3, 1), sizes, 2); }),
                AllOf(HasSubstr("expected 2 split sizes"), HasSubstr("size of the first dimension, 3")));
  }
}

TEST(WholeAndPart, FitTogether) {
  const WholeAndPart operands("operation", counting(4, 2), counting(2, 2), 2, Use::kMove);
  EXPECT_EQ(operands.whole.count(), 8u);
  EXPECT_EQ(operands.part.count(), 4u);
}

TEST(WholeAndPart, AreRefusedWhenTheyDoNotFit) {
  EXPECT_THAT(refusal([] { WholeAndPart("all_gather", counting(3, 1), counting(2, 1), 2, Use::kMove); }),
              AllOf(HasSubstr("all_gather: "), HasSubstr("2 times the elements"), HasSubstr("found 3 of Float and 2")));
  const at::Tensor bytes = at::empty({4}, at::kByte);
  EXPECT_THAT(refusal([&] { WholeAndPart("operation", bytes, at::empty({2}, at::kChar), 2, Use::kMove); }),
              HasSubstr("4 of Byte and 2 of Char"));
}

}  // namespace
}  // namespace accelerate_cpp
