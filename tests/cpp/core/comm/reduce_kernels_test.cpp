#include "core/comm/reduce_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/comm/reduction_reference.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

template <class TypedElement>
class ReductionOf : public ::testing::Test {};
TYPED_TEST_SUITE(ReductionOf, AllElements);

template <class TypedElement>
class ReductionOfFloating : public ::testing::Test {};
TYPED_TEST_SUITE(ReductionOfFloating, FloatingElements);

// Round and odd sizes about the width of vector registers and about groups of them.
constexpr std::size_t kCounts[] = {0,   1,   2,   3,   7,   15,  16,  17,  31,  33,  63,   65,
                                   127, 128, 129, 255, 257, 511, 512, 513, 640, 801, 1023, 1025};

// Compares `result` with the reference, and says where they differ.
template <class T>
void expect_reduced(const ReduceKernels& kernel, ReduceOp op, const std::vector<std::vector<T>>& sources,
                    const T* result, const std::string& what) {
  for (std::size_t i = 0; i < sources[0].size(); ++i) {
    ASSERT_TRUE(same(result[i], expected(op, sources, i)))
        << kernel.instruction_set << ", " << name(op) << " of " << sources.size() << " sources of " << sources[0].size()
        << ", " << what << ", element " << i;
  }
}

TYPED_TEST(ReductionOf, CombinesSourcesInOrderAsPlainArithmeticDoes) {
  using T = typename TypeParam::Element;
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    for (const ReduceOp op : reductions_of(TypeParam::kDType)) {
      for (const std::size_t count : kCounts) {
        for (const std::size_t num_sources : {1u, 2u, 3u}) {
          const auto sources = arrays(num_sources, count, random_element<T>);
          const auto result = reduce_simply(kernel, TypeParam::kDType, op, sources, some_scale(op));
          expect_reduced(kernel, op, sources, result.data(), "one destination");
        }
      }
    }
  }
}

// An array within larger memory that begins `shift` elements after a whole cache line and is surrounded by 0x5a.
template <class T>
class Place {
 public:
  Place(std::size_t count, std::size_t shift) : count_(count), bytes_((count + shift) * sizeof(T) + 3 * 64) {
    std::memset(bytes_.data(), 0x5a, bytes_.size());
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    begin_ = 64 + (64 - address % 64) % 64 + shift * sizeof(T);
  }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + begin_); }

  void fill(const std::vector<T>& values) { std::copy(values.begin(), values.end(), data()); }

  bool is_untouched_outside() const {
    const auto is_filler = [](unsigned char byte) { return byte == 0x5a; };
    const auto begin = bytes_.begin() + static_cast<std::ptrdiff_t>(begin_);
    return std::all_of(bytes_.begin(), begin, is_filler) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(count_ * sizeof(T)), bytes_.end(), is_filler);
  }

 private:
  std::size_t count_;
  std::vector<unsigned char> bytes_;
  std::size_t begin_;
};

// Copies `sources` to places of different alignment, lets `num_in_place` of the destinations be sources, the last ones,
// and the others new places, and checks every byte.
template <class T>
void check_at_places(const ReduceKernels& kernel, DType dtype, ReduceOp op, const std::vector<std::vector<T>>& sources,
                     std::size_t num_destinations, std::size_t num_in_place) {
  const std::size_t count = sources[0].size();
  std::vector<Place<T>> places;
  std::vector<const T*> from;
  std::vector<T*> to;
  for (std::size_t k = 0; k < sources.size() + num_destinations - num_in_place; ++k) {
    places.emplace_back(count, (k * 5 + num_destinations) % 8);
  }
  for (std::size_t s = 0; s < sources.size(); ++s) {
    places[s].fill(sources[s]);
    from.push_back(places[s].data());
  }
  for (std::size_t d = 0; d < num_destinations; ++d) {
    to.push_back(places[places.size() - 1 - d].data());
  }
  call<T>(kernel, dtype, op, from, to, count);
  for (std::size_t d = 0; d < num_destinations; ++d) {
    expect_reduced(kernel, op, sources, to[d],
                   std::to_string(num_in_place) + " in place, destination " + std::to_string(d) + " of " +
                       std::to_string(num_destinations));
  }
  for (std::size_t k = 0; k < places.size(); ++k) {
    ASSERT_TRUE(places[k].is_untouched_outside()) << kernel.instruction_set << ", count " << count << ", array " << k;
  }
  for (std::size_t s = 0; s < sources.size() && places.size() - s > num_destinations; ++s) {
    ASSERT_TRUE(same_bits(from[s], sources[s].data(), count)) << "source " << s << " is changed";
  }
}

TYPED_TEST(ReductionOf, TakesAnyNumberOfArraysOfAnyAlignmentAndDestinationsThatAreSources) {
  using T = typename TypeParam::Element;
  std::size_t turn = 0;
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    for (const ReduceOp op : reductions_of(TypeParam::kDType)) {
      for (std::size_t num_sources = 1; num_sources <= 8; ++num_sources) {
        for (std::size_t num_destinations = 1; num_destinations <= 3; ++num_destinations) {
          for (std::size_t in_place = 0; in_place <= std::min(num_sources, num_destinations); ++in_place) {
            const std::size_t count = kCounts[turn++ % std::size(kCounts)];
            const auto sources = arrays(num_sources, count, random_element<T>);
            check_at_places(kernel, TypeParam::kDType, op, sources, num_destinations, in_place);
            if (this->HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(ReductionOf, ReplacesAllSourcesAtOnce) {
  using T = typename TypeParam::Element;
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    for (const ReduceOp op : reductions_of(TypeParam::kDType)) {
      for (const std::size_t num_ranks : {2u, 3u, 8u}) {
        const auto sources = arrays(num_ranks, 1201, random_element<T>);
        auto places = sources;
        std::vector<T*> pointers;
        for (std::vector<T>& place : places) {
          pointers.push_back(place.data());
        }
        call<T>(kernel, TypeParam::kDType, op, {pointers.begin(), pointers.end()}, pointers, 1201);
        for (const std::vector<T>& place : places) {
          expect_reduced(kernel, op, sources, place.data(), "in place");
        }
      }
    }
  }
}

// More than fits into the caches is stored past them: compared with the same reduction in pieces that are not.
TYPED_TEST(ReductionOf, GivesTheSameForResultsThatAreTooLargeForTheCaches) {
  using T = typename TypeParam::Element;
  const std::size_t count = (std::size_t{3} << 20) / sizeof(T) + 77;
  const auto sources = arrays(2, count, random_element<T>);
  const ReduceOp op = is_floating(TypeParam::kDType) ? ReduceOp::kAvg : ReduceOp::kSum;
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    std::vector<T> reference(count);
    for (std::size_t begin = 0; begin < count; begin += 1000) {
      call<T>(kernel, TypeParam::kDType, op, {&sources[0][begin], &sources[1][begin]}, {&reference[begin]},
              std::min<std::size_t>(1000, count - begin));
    }
    for (const std::size_t shift : {0u, 3u}) {
      for (const std::size_t second_shift : {3u, 5u}) {
        Place<T> first(count, shift);
        Place<T> second(count, second_shift);
        call<T>(kernel, TypeParam::kDType, op, {sources[0].data(), sources[1].data()}, {first.data(), second.data()},
                count);
        EXPECT_TRUE(same_bits<T>(first.data(), reference.data(), count)) << kernel.instruction_set;
        EXPECT_TRUE(same_bits<T>(second.data(), reference.data(), count)) << kernel.instruction_set;
        EXPECT_TRUE(first.is_untouched_outside() && second.is_untouched_outside()) << kernel.instruction_set;
      }
    }
  }
}

// Where several sources are NaN, which of them becomes the result is up to the compiler: all but the first become zero.
template <class T>
void keep_one_nan(std::vector<std::vector<T>>& sources) {
  for (std::size_t i = 0; i < sources[0].size(); ++i) {
    bool found = false;
    for (std::vector<T>& source : sources) {
      const bool nan = is_nan(source[i]);
      source[i] = nan && found ? T{} : source[i];
      found = found || nan;
    }
  }
}

TYPED_TEST(ReductionOf, GivesTheSameBitsWithEveryInstructionSet) {
  using T = typename TypeParam::Element;
  const std::vector<ReduceKernels> kernels = present_reduce_kernels();
  if (kernels.size() == 1) {
    GTEST_SKIP() << "this processor runs the portable kernels only";
  }
  for (const ReduceOp op : reductions_of(TypeParam::kDType)) {
    for (const std::size_t num_sources : {1u, 2u, 3u}) {
      for (const double scale : {1.0, 1.0 / 3, 1e-6}) {
        auto sources = arrays(num_sources, 20011, random_bits<T>);
        keep_one_nan(sources);
        const std::vector<T> reference = reduce_simply(kernels[0], TypeParam::kDType, op, sources, scale);
        for (std::size_t k = 1; k < kernels.size(); ++k) {
          const std::vector<T> result = reduce_simply(kernels[k], TypeParam::kDType, op, sources, scale);
          EXPECT_TRUE(same_bits(result.data(), reference.data(), reference.size()))
              << kernels[k].instruction_set << ", " << name(op) << ", scale " << scale;
        }
      }
    }
  }
}

TYPED_TEST(ReductionOfFloating, LetsANanOfAnySourceWinMinimumMaximumSumAndProduct) {
  using T = typename TypeParam::Element;
  using V = decltype(widen(T{}));
  const T nan = narrow<T>(std::numeric_limits<V>::quiet_NaN());
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    for (const ReduceOp op : reductions_of(TypeParam::kDType)) {
      for (std::size_t s = 0; s < 3; ++s) {
        auto sources = arrays(3, 67, random_element<T>);
        for (std::size_t i = 0; i < 67; i += 3) {
          sources[s][i] = nan;
        }
        const std::vector<T> result = reduce_simply(kernel, TypeParam::kDType, op, sources, 1.0);
        for (std::size_t i = 0; i < 67; ++i) {
          ASSERT_EQ(is_nan(result[i]), i % 3 == 0)
              << kernel.instruction_set << ", " << name(op) << ", NaN in source " << s << ", element " << i;
        }
      }
    }
  }
}

template <class T>
T reduce_one(DType dtype, ReduceOp op, const std::vector<T>& elements, double scale = 1.0) {
  std::vector<std::vector<T>> sources;
  for (const T element : elements) {
    sources.push_back({element});
  }
  return reduce_simply(ReduceKernels{reduce_instruction_set(), comm::reduce}, dtype, op, sources, scale)[0];
}

TEST(ReduceKernels, KeepEverySixteenBitPatternThatIsAlone) {
  std::vector<std::vector<std::uint16_t>> patterns(1);
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    patterns[0].push_back(static_cast<std::uint16_t>(bits));
  }
  for (const ReduceKernels& kernel : present_reduce_kernels()) {
    const auto halves = reduce_simply(kernel, DType::kFloat16, ReduceOp::kSum, patterns, 1.0);
    const auto brains = reduce_simply(kernel, DType::kBFloat16, ReduceOp::kSum, patterns, 1.0);
    for (const std::uint16_t bits : patterns[0]) {
      ASSERT_EQ(halves[bits], to_float16(to_float(Float16{bits})).bits) << kernel.instruction_set;
      ASSERT_EQ(brains[bits], to_bfloat16(to_float(BFloat16{bits})).bits) << kernel.instruction_set;
    }
  }
}

TEST(ReduceKernels, WrapWhenIntegersOverflow) {
  EXPECT_EQ(reduce_one<std::int8_t>(DType::kInt8, ReduceOp::kSum, {100, 100}), -56);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kUInt8, ReduceOp::kSum, {200, 100}), 44);
  EXPECT_EQ(reduce_one<std::int16_t>(DType::kInt16, ReduceOp::kProduct, {-32768, -32768, 3}), 0);
  EXPECT_EQ(reduce_one<std::int32_t>(DType::kInt32, ReduceOp::kSum, {2147483647, 1}), -2147483648);
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduce_one<std::int64_t>(DType::kInt64, ReduceOp::kSum, {largest, 1}),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reduce_one<std::int64_t>(DType::kInt64, ReduceOp::kProduct, {largest, 2}), -2);
}

TEST(ReduceKernels, CompareSignedIntegersAsSigned) {
  EXPECT_EQ(reduce_one<std::int8_t>(DType::kInt8, ReduceOp::kMin, {5, -3, 100}), -3);
  EXPECT_EQ(reduce_one<std::int64_t>(DType::kInt64, ReduceOp::kMax, {-5, -3, -100}), -3);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kUInt8, ReduceOp::kMax, {5, 253, 100}), 253);
}

TEST(ReduceKernels, CombineBitsOfIntegersAndBooleans) {
  EXPECT_EQ(reduce_one<std::int16_t>(DType::kInt16, ReduceOp::kBitAnd, {0x0ff0, 0x7f3c, -1}), 0x0f30);
  EXPECT_EQ(reduce_one<std::int32_t>(DType::kInt32, ReduceOp::kBitOr, {0x0f, -256}), -241);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kUInt8, ReduceOp::kBitXor, {0x0f, 0x3c, 0x01}), 0x32);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kBool, ReduceOp::kBitXor, {1, 1, 1}), 1);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kBool, ReduceOp::kBitXor, {1, 0, 1}), 0);
  EXPECT_EQ(reduce_one<std::uint8_t>(DType::kBool, ReduceOp::kSum, {1, 1, 1}), 1);
}

TEST(ReduceKernels, RoundSixteenBitSumsOnceAtTheEnd) {
  const auto half = [](float value) { return to_float16(value); };
  // Rounded after each addition, 2048 + 1 would stay 2048.
  EXPECT_EQ(reduce_one<Float16>(DType::kFloat16, ReduceOp::kSum, {half(2048), half(1), half(1)}).bits, half(2050).bits);
  // The sum does not fit into 16 bits, the average does.
  EXPECT_EQ(reduce_one<Float16>(DType::kFloat16, ReduceOp::kAvg, {half(60000), half(60000)}, 0.5).bits,
            half(60000).bits);
  const auto brain = [](float value) { return to_bfloat16(value); };
  EXPECT_EQ(reduce_one<BFloat16>(DType::kBFloat16, ReduceOp::kSum, {brain(256), brain(1), brain(1)}).bits,
            brain(258).bits);
}

TEST(ReduceKernels, MultiplyEachSourceByItsOwnFactor) {
  const float sources[] = {3.0f, 5.0f};
  const void* const from[] = {&sources[0], &sources[1]};
  const double factors[] = {0.5, -2.0};
  float result = 0;
  void* const to[] = {&result};
  reduce(DType::kFloat32, ReduceOp::kPreMulSum, {from, 2, to, 1, 1, 1.0, factors});
  EXPECT_EQ(result, -8.5f);
  EXPECT_THROW(reduce(DType::kFloat32, ReduceOp::kPreMulSum, {from, 2, to, 1, 1, 1.0, nullptr}), InternalError);
}

TEST(ReduceKernels, RefuseReductionsThatADTypeDoesNotHave) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::vector<ReduceOp> defined = reductions_of(dtype);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                              ReduceOp::kPreMulSum, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      if (std::find(defined.begin(), defined.end(), op) != defined.end()) {
        EXPECT_NO_THROW(check_reduction(dtype, op)) << name(dtype) << " " << name(op);
        continue;
      }
      const char* const what = op == ReduceOp::kAvg         ? "average"
                               : op == ReduceOp::kPreMulSum ? "sum with factors"
                                                            : name(op);
      const auto refusal =
          ThrowsMessage<InvalidArgument>(AllOf(HasSubstr(what), HasSubstr(name(dtype)), HasSubstr("onvert first")));
      EXPECT_THAT([=] { check_reduction(dtype, op); }, refusal);
      EXPECT_THAT(([=] { reduce(dtype, op, {nullptr, 0, nullptr, 0, 0, 1.0}); }), refusal);
    }
  }
}

TEST(ReduceKernels, UseTheBestInstructionSetThatIsPresent) {
  EXPECT_STREQ(reduce_instruction_set(), present_reduce_kernels().front().instruction_set);
  EXPECT_STREQ(present_reduce_kernels().back().instruction_set, "portable");
}

}  // namespace
}  // namespace accelerate_cpp::comm
