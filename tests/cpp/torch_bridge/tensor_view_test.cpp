#include "torch_bridge/tensor_view.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
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

TEST(TensorView, RefusesADtypeThatCannotBeReducedAndSaysWhatToDo) {
  EXPECT_THAT(refusal([] { view_of(at::empty({1}, at::kUInt16)); }),
              AllOf(HasSubstr("UInt16"), HasSubstr("expected float16, bfloat16, float32"),
                    HasSubstr("view its bytes as uint8")));
  EXPECT_THAT(refusal([] { dtype_of(at::empty({1}, at::kComplexFloat)); }),
              AllOf(HasSubstr("ComplexFloat"), HasSubstr("torch.view_as_real")));
}

TEST(TensorView, TakesComplexNumbersAsPairs) {
  const std::vector<std::pair<at::ScalarType, DType>> dtypes = {
      {at::kComplexHalf, DType::kFloat16}, {at::kComplexFloat, DType::kFloat32}, {at::kComplexDouble, DType::kFloat64}};
  for (const auto& [complex, real] : dtypes) {
    for (const Use use : {Use::kCompute, Use::kMove}) {
      const MemoryView view = view_of(at::empty({3}, complex), use);
      EXPECT_EQ(view.count, 6u);
      EXPECT_EQ(view.dtype, real);
    }
  }
}

TEST(TensorView, TakesWhatIsOnlyMovedAsBytes) {
  for (const at::ScalarType dtype : {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor tensor = at::empty({3}, dtype);
    const MemoryView view = view_of(tensor, Use::kMove);
    EXPECT_EQ(view.count, tensor.nbytes());
    EXPECT_EQ(view.dtype, DType::kUInt8);
  }
  EXPECT_EQ(view_of(at::empty({3}, at::kLong), Use::kMove).dtype, DType::kInt64) << "known dtypes keep their name";
  const auto quantized = [] { Contiguous(at::empty({1}, at::TensorOptions().dtype(at::kQInt8)), Use::kMove); };
  EXPECT_THAT(refusal(quantized), HasSubstr("QInt8"));
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
  const std::vector<MemoryView> parts = split_view(view_of(tensor), 3);
  ASSERT_EQ(parts.size(), 3u);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    EXPECT_EQ(parts[p].count, 4u);
    EXPECT_EQ(static_cast<float*>(parts[p].data)[0], 4.0f * static_cast<float>(p));
  }
}

TEST(TensorView, DoesNotSplitWhatCannotBeDividedEvenly) {
  const auto split = [] { split_view({nullptr, 7, DType::kFloat32}, 3); };
  EXPECT_THAT(refusal(split), HasSubstr("7 elements cannot be divided evenly among 3 ranks"));
}

std::vector<float> values(const MemoryView& view) {
  const auto* const data = static_cast<const float*>(view.data);
  return {data, data + view.count};
}

TEST(Contiguous, IsTheTensorItselfWhereThatIsContiguous) {
  const at::Tensor tensor = counting({2, 3});
  Contiguous data(tensor);
  EXPECT_EQ(data.load().data, tensor.data_ptr());
  EXPECT_EQ(data.reserve().data, tensor.data_ptr());
  EXPECT_EQ(data.count(), 6u);
  EXPECT_EQ(data.dtype(), DType::kFloat32);
  EXPECT_EQ(Contiguous(at::empty({0, 3}, at::kFloat)).count(), 0u);
}

TEST(Contiguous, StandsInForAnyStridesAndCopiesHomeOnlyWhenAsked) {
  const at::Tensor base = counting({2, 3});
  Contiguous stand_in(base.t());
  const MemoryView view = stand_in.load();
  EXPECT_EQ(values(view), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  static_cast<float*>(view.data)[1] = 30;
  EXPECT_EQ(base[1][0].item<float>(), 3);
  stand_in.store();
  EXPECT_EQ(base[1][0].item<float>(), 30);
}

TEST(Contiguous, ReadsTheTensorWhenItIsAskedTo) {
  const at::Tensor base = counting({2, 3});
  Contiguous stand_in(base.t());
  base.fill_(7);
  EXPECT_EQ(values(stand_in.load()), std::vector<float>(6, 7));
}

TEST(Contiguous, HasRoomForResultsOfAnyStrides) {
  const at::Tensor base = counting({2, 3});
  Contiguous result(base.t());
  const MemoryView view = result.reserve();
  EXPECT_EQ(view.count, 6u);
  std::fill_n(static_cast<float*>(view.data), 6, 9.0f);
  EXPECT_EQ(base[0][0].item<float>(), 0);
  result.store();
  EXPECT_EQ(base.sum().item<float>(), 54);
}

TEST(Contiguous, ResolvesConjugationThatIsPending) {
  const at::Tensor numbers = at::full({2}, c10::complex<double>(1, 2), at::kComplexFloat);
  Contiguous data(numbers.conj());
  const MemoryView view = data.load();
  EXPECT_EQ(values(view), (std::vector<float>{1, -2, 1, -2}));
  static_cast<float*>(view.data)[1] = 5;
  data.store();
  EXPECT_EQ(numbers[0].item<c10::complex<float>>(), c10::complex<float>(1, -5));
}

TEST(Contiguous, WritesToTensorsOfWhichAutogradAndInferenceModeKnow) {
  at::Tensor leaf = counting({2, 3}).requires_grad_();
  at::Tensor inferred;
  {
    const c10::InferenceMode inference;
    inferred = counting({2, 3}).t();
  }
  for (const at::Tensor& tensor : {leaf.t(), inferred}) {
    Contiguous data(tensor);
    const MemoryView view = data.load();
    std::fill_n(static_cast<float*>(view.data), 6, 1.0f);
    data.store();
    EXPECT_EQ(tensor.sum().item<float>(), 6);
  }
  EXPECT_TRUE(leaf.is_leaf());
}

TEST(Contiguous, RepeatsTheElementsOfAnExpandedTensorAndDoesNotWriteToThem) {
  Contiguous stand_in(counting({2, 1}).expand({2, 3}));
  EXPECT_EQ(values(stand_in.load()), (std::vector<float>{0, 0, 0, 1, 1, 1}));
  EXPECT_THAT(refusal([&] { stand_in.store(); }), HasSubstr("elements share memory"));
}

TEST(Contiguous, RefusesWhatIsNotDenseAndOnTheCpu) {
  EXPECT_THAT(refusal([] { Contiguous(counting({2, 3}).to_sparse()); }), HasSubstr("dense CPU tensors"));
  EXPECT_THAT(refusal([] { Contiguous(at::empty({2}, at::TensorOptions().device(at::kMeta))); }),
              HasSubstr("found a tensor on meta"));
}

}  // namespace
}  // namespace accelerate_cpp
