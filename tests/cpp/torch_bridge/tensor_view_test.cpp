#include "torch_bridge/tensor_view.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

using ::testing::AllOf;
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

at::Tensor counting(at::IntArrayRef sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) {
    count *= size;
  }
  return at::arange(count, at::kFloat).reshape(sizes);
}

TEST(TensorView, KnowsEveryDtypeOfTheCoreByTheNameAndSizeThatTorchUses) {
  const std::vector<std::pair<at::ScalarType, std::string>> dtypes = {
      {at::kFloat, "float32"}, {at::kDouble, "float64"}, {at::kHalf, "float16"}, {at::kBFloat16, "bfloat16"},
      {at::kChar, "int8"},     {at::kShort, "int16"},    {at::kInt, "int32"},    {at::kLong, "int64"},
      {at::kByte, "uint8"},    {at::kBool, "bool"}};
  ASSERT_EQ(dtypes.size(), static_cast<std::size_t>(kNumDTypes));
  for (const auto& [torch_dtype, torch_name] : dtypes) {
    const DType dtype = dtype_of(at::empty({1}, torch_dtype));
    EXPECT_EQ(name(dtype), torch_name);
    EXPECT_EQ(element_size(dtype), c10::elementSize(torch_dtype)) << torch_name;
  }
}

TEST(TensorView, RefusesADtypeThatNoCollectiveCarriesAndSaysWhatToDo) {
  const auto complex = [] { dtype_of(at::empty({1}, at::kComplexFloat)); };
  EXPECT_THAT(refusal(complex), AllOf(HasSubstr("ComplexFloat"), HasSubstr("expected float16, bfloat16, float32"),
                                      HasSubstr("view its bytes as uint8")));
  EXPECT_THAT(refusal([] { view_of(at::empty({1}, at::kUInt16)); }), HasSubstr("UInt16"));
}

TEST(TensorView, IsTheMemoryOfTheTensorItself) {
  const at::Tensor tensor = counting({2, 3});
  const MemoryView view = view_of(tensor);
  EXPECT_EQ(view.data, tensor.data_ptr());
  EXPECT_EQ(view.count, 6u);
  static_cast<float*>(view.data)[4] = 40;
  EXPECT_EQ(tensor[1][1].item<float>(), 40);
}

TEST(TensorView, StartsWhereASliceStarts) {
  const at::Tensor rows = counting({4, 3}).narrow(0, 2, 2);
  const MemoryView view = view_of(rows);
  EXPECT_EQ(view.count, 6u);
  EXPECT_EQ(static_cast<float*>(view.data)[0], 6);
}

TEST(TensorView, IsEmptyForATensorWithoutElements) {
  EXPECT_EQ(view_of(at::empty({0, 3}, at::kFloat)).count, 0u);
  EXPECT_EQ(view_of(at::empty({}, at::kFloat)).count, 1u);
}

TEST(TensorView, RefusesWhatIsNotDenseContiguousAndOnTheCpu) {
  EXPECT_THAT(refusal([] { view_of(counting({2, 3}).t()); }), HasSubstr("call .contiguous() first"));
  const at::Tensor elsewhere = at::empty({2}, at::TensorOptions().device(at::kMeta));
  EXPECT_THAT(refusal([&] { view_of(elsewhere); }), HasSubstr("found a tensor on meta"));
  EXPECT_THAT(refusal([] { view_of(counting({2, 3}).to_sparse()); }), HasSubstr("layout sparse"));
}

TEST(TensorView, SplitsIntoEqualPartsInOrder) {
  const at::Tensor tensor = counting({3, 4});
  const std::vector<MemoryView> parts = split_view(tensor, 3);
  ASSERT_EQ(parts.size(), 3u);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    EXPECT_EQ(parts[p].count, 4u);
    EXPECT_EQ(static_cast<float*>(parts[p].data)[0], 4.0f * static_cast<float>(p));
  }
}

TEST(TensorView, DoesNotSplitWhatCannotBeDividedEvenly) {
  const auto split = [] { split_view(counting({7}), 3); };
  EXPECT_THAT(refusal(split), HasSubstr("7 elements cannot be divided evenly among 3 ranks"));
}

TEST(Contiguous, IsTheTensorItselfWhereThatIsContiguous) {
  const at::Tensor tensor = counting({2, 3});
  EXPECT_EQ(Contiguous(tensor).view().data, tensor.data_ptr());
}

TEST(Contiguous, StandsInForAnyStridesAndCopiesHomeOnlyWhenAsked) {
  const at::Tensor base = counting({2, 3});
  const Contiguous stand_in(base.t());
  auto* const data = static_cast<float*>(stand_in.view().data);
  EXPECT_EQ(std::vector<float>(data, data + 6), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  data[1] = 30;
  EXPECT_EQ(base[1][0].item<float>(), 3);
  stand_in.write_back();
  EXPECT_EQ(base[1][0].item<float>(), 30);
}

TEST(Contiguous, RepeatsTheElementsOfAnExpandedTensor) {
  const Contiguous stand_in(counting({2, 1}).expand({2, 3}));
  auto* const data = static_cast<float*>(stand_in.view().data);
  EXPECT_EQ(std::vector<float>(data, data + 6), (std::vector<float>{0, 0, 0, 1, 1, 1}));
}

TEST(Contiguous, RefusesSparseTensorsInTheWordsOfAView) {
  const auto view = [] { Contiguous(counting({2, 3}).to_sparse()).view(); };
  EXPECT_THAT(refusal(view), HasSubstr("dense CPU tensors"));
}

}  // namespace
}  // namespace accelerate_cpp
