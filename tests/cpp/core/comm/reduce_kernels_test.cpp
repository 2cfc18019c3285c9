#include "core/comm/reduce_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/error.h"
#include "core/base/half.h"

namespace accelerate_cpp::comm {

namespace portable {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
#if defined(__x86_64__)
namespace avx2 {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
namespace avx512 {
void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments);
}
#endif

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Kernel {
  std::string instruction_set;
  void (*reduce)(DType, ReduceOp, const ReduceArguments&);
};

// Those that this processor can run, the best last.
std::vector<Kernel> present_kernels() {
  std::vector<Kernel> kernels = {{"portable", portable::reduce}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    kernels.push_back({"avx2", avx2::reduce});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    kernels.push_back({"avx512", avx512::reduce});
  }
#endif
  return kernels;
}

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

struct Boolean {
  std::uint8_t value;
};

template <class T, DType kType>
struct Typed {
  using Element = T;
  static constexpr DType kDType = kType;
};

// What is combined for an element: itself, or a float for the 16-bit formats.
template <class T>
auto widen(T element) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return to_float(element);
  } else {
    return element;
  }
}

template <class T, class V>
T narrow(V value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(value);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(value);
  } else {
    return value;
  }
}

template <class V>
V combine(ReduceOp op, V a, V b) {
  if constexpr (std::is_floating_point_v<V>) {
    if ((op == ReduceOp::kMin || op == ReduceOp::kMax) && (std::isnan(a) || std::isnan(b))) {
      return std::numeric_limits<V>::quiet_NaN();
    }
  }
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      if constexpr (std::is_integral_v<V>) {
        return static_cast<V>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
      } else {
        return a * b;
      }
    default:
      if constexpr (std::is_integral_v<V>) {
        return static_cast<V>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
      } else {
        return a + b;
      }
  }
}

Boolean combine(ReduceOp op, Boolean a, Boolean b) {
  const bool all = op == ReduceOp::kMin || op == ReduceOp::kProduct;
  return {static_cast<std::uint8_t>(all ? a.value & b.value : a.value | b.value)};
}

// Element `index` of the reduction, one plain scalar operation after the other.
template <class T>
T expected(ReduceOp op, const std::vector<std::vector<T>>& sources, std::size_t index, double scale) {
  auto value = widen(sources[0][index]);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    value = combine(op, value, widen(sources[s][index]));
  }
  if constexpr (std::is_floating_point_v<decltype(value)>) {
    value = scale == 1.0 ? value : value * static_cast<decltype(value)>(scale);
  }
  return narrow<T>(value);
}

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<decltype(widen(value))>) {
    return std::isnan(widen(value));
  } else {
    return false;
  }
}

template <class T>
bool same(T a, T b) {
  return (is_nan(a) && is_nan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Integers of any magnitude, so that sums and products overflow; floating values of moderate magnitude.
template <class T>
T random_element(std::mt19937_64& random) {
  if constexpr (std::is_same_v<T, Boolean>) {
    return {static_cast<std::uint8_t>(random() & 1)};
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random());
  } else {
    const double value = std::uniform_real_distribution<double>(-8, 8)(random);
    return narrow<T>(static_cast<decltype(widen(T{}))>(value));
  }
}

// Elements of any bits, NaNs and infinities included; all NaNs are the one that x86 makes, for when two meet, which of
// them survives is up to the compiler.
template <class T>
T random_bits(std::mt19937_64& random) {
  const std::uint64_t bits = random();
  T element{};
  std::memcpy(&element, &bits, sizeof(T));
  if constexpr (std::is_same_v<T, Boolean>) {
    element.value &= 1;
  } else if constexpr (std::is_floating_point_v<T>) {
    element = std::isnan(element) ? -std::numeric_limits<T>::quiet_NaN() : element;
  } else if constexpr (std::is_same_v<T, Float16>) {
    element.bits = is_nan(element) ? 0xfe00 : element.bits;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    element.bits = is_nan(element) ? 0xffc0 : element.bits;
  }
  return element;
}

// Calls the kernel on typed arrays.
template <class T>
void call(const Kernel& kernel, DType dtype, ReduceOp op, const std::vector<const T*>& sources,
          const std::vector<T*>& destinations, std::size_t count, double scale = 1.0) {
  const std::vector<const void*> from(sources.begin(), sources.end());
  const std::vector<void*> to(destinations.begin(), destinations.end());
  kernel.reduce(dtype, op,
                {from.data(), static_cast<int>(from.size()), to.data(), static_cast<int>(to.size()), count, scale});
}

template <class T>
std::vector<T> reduce_simply(const Kernel& kernel, DType dtype, ReduceOp op, const std::vector<std::vector<T>>& sources,
                             double scale = 1.0) {
  std::vector<const T*> pointers;
  for (const std::vector<T>& source : sources) {
    pointers.push_back(source.data());
  }
  std::vector<T> result(sources[0].size());
  call<T>(kernel, dtype, op, pointers, {result.data()}, result.size(), scale);
  return result;
}

template <class T>
std::vector<std::vector<T>> arrays(std::size_t num, std::size_t count, T (*element)(std::mt19937_64&)) {
  std::mt19937_64 random(count * 31 + num);
  std::vector<std::vector<T>> result(num, std::vector<T>(count));
  for (std::vector<T>& array : result) {
    for (T& value : array) {
      value = element(random);
    }
  }
  return result;
}

template <class TypedElement>
class Reduction : public ::testing::Test {};
using Elements = ::testing::Types<Typed<float, DType::kFloat32>, Typed<double, DType::kFloat64>,
                                  Typed<Float16, DType::kFloat16>, Typed<BFloat16, DType::kBFloat16>,
                                  Typed<std::int8_t, DType::kInt8>, Typed<std::int16_t, DType::kInt16>,
                                  Typed<std::int32_t, DType::kInt32>, Typed<std::int64_t, DType::kInt64>,
                                  Typed<std::uint8_t, DType::kUInt8>, Typed<Boolean, DType::kBool>>;
TYPED_TEST_SUITE(Reduction, Elements);

// Round and odd sizes about the width of vector registers and the block of the kernels.
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 129, 1000, 1023, 1024, 1025, 2049};

TYPED_TEST(Reduction, CombinesSourcesInOrderAsPlainArithmeticDoes) {
  using T = typename TypeParam::Element;
  for (const Kernel& kernel : present_kernels()) {
    for (const ReduceOp op : kOps) {
      for (const std::size_t count : kCounts) {
        for (const std::size_t num_sources : {1u, 2u, 3u}) {
          const auto sources = arrays(num_sources, count, random_element<T>);
          const double scale = op == ReduceOp::kAvg && is_floating(TypeParam::kDType) ? 1.0 / 3 : 1.0;
          const std::vector<T> result = reduce_simply(kernel, TypeParam::kDType, op, sources, scale);
          for (std::size_t i = 0; i < count; ++i) {
            ASSERT_TRUE(same(result[i], expected(op, sources, i, scale)))
                << kernel.instruction_set << ", op " << static_cast<int>(op) << ", " << num_sources << " sources of "
                << count << ", element " << i;
          }
        }
      }
    }
  }
}

TYPED_TEST(Reduction, GivesTheSameBitsWithEveryInstructionSet) {
  using T = typename TypeParam::Element;
  const std::vector<Kernel> kernels = present_kernels();
  if (kernels.size() == 1) {
    GTEST_SKIP() << "this processor runs the portable kernels only";
  }
  for (const ReduceOp op : kOps) {
    for (const double scale : {1.0, 1.0 / 3}) {
      const auto sources = arrays(3, 20011, random_bits<T>);
      const std::vector<T> reference = reduce_simply(kernels[0], TypeParam::kDType, op, sources, scale);
      for (std::size_t k = 1; k < kernels.size(); ++k) {
        const std::vector<T> result = reduce_simply(kernels[k], TypeParam::kDType, op, sources, scale);
        EXPECT_EQ(std::memcmp(result.data(), reference.data(), reference.size() * sizeof(T)), 0)
            << kernels[k].instruction_set << ", op " << static_cast<int>(op) << ", scale " << scale;
      }
    }
  }
}

TYPED_TEST(Reduction, WorksInPlaceAndStoresIntoEveryDestination) {
  using T = typename TypeParam::Element;
  for (const Kernel& kernel : present_kernels()) {
    for (const std::size_t count : {5u, 1024u, 3001u}) {
      const auto sources = arrays(3, count, random_element<T>);
      const std::vector<T> result = reduce_simply(kernel, TypeParam::kDType, ReduceOp::kSum, sources);
      std::vector<std::vector<T>> places = sources;
      places.emplace_back(count);
      call<T>(kernel, TypeParam::kDType, ReduceOp::kSum, {places[0].data(), places[1].data(), places[2].data()},
              {places[2].data(), places[0].data(), places[1].data(), places[3].data()}, count);
      for (const std::vector<T>& place : places) {
        EXPECT_EQ(std::memcmp(place.data(), result.data(), count * sizeof(T)), 0)
            << kernel.instruction_set << ", count " << count;
      }
    }
  }
}

TYPED_TEST(Reduction, TouchesNothingBesideArraysThatAreAlignedToAnElementOnly) {
  using T = typename TypeParam::Element;
  for (const Kernel& kernel : present_kernels()) {
    for (const std::size_t count : kCounts) {
      const auto sources = arrays(2, count + 1, random_element<T>);
      std::vector<T> result(count + 65);
      std::memset(result.data(), 0x5a, result.size() * sizeof(T));
      const std::vector<T> untouched = result;
      call<T>(kernel, TypeParam::kDType, ReduceOp::kMax, {sources[0].data() + 1, sources[1].data() + 1},
              {result.data() + 1}, count);
      EXPECT_TRUE(same(result[0], untouched[0]));
      EXPECT_EQ(std::memcmp(&result[count + 1], &untouched[count + 1], 64 * sizeof(T)), 0) << kernel.instruction_set;
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_TRUE(same(result[i + 1], expected(ReduceOp::kMax, sources, i + 1, 1.0))) << count << ", element " << i;
      }
    }
  }
}

template <class TypedElement>
class FloatingReduction : public ::testing::Test {};
using FloatingElements = ::testing::Types<Typed<float, DType::kFloat32>, Typed<double, DType::kFloat64>,
                                          Typed<Float16, DType::kFloat16>, Typed<BFloat16, DType::kBFloat16>>;
TYPED_TEST_SUITE(FloatingReduction, FloatingElements);

TYPED_TEST(FloatingReduction, LetsANanOfAnySourceWinMinimumMaximumSumAndProduct) {
  using T = typename TypeParam::Element;
  using V = decltype(widen(T{}));
  const T nan = narrow<T>(std::numeric_limits<V>::quiet_NaN());
  for (const Kernel& kernel : present_kernels()) {
    for (const ReduceOp op : kOps) {
      for (std::size_t s = 0; s < 3; ++s) {
        auto sources = arrays(3, 67, random_element<T>);
        for (std::size_t i = 0; i < 67; i += 3) {
          sources[s][i] = nan;
        }
        const std::vector<T> result = reduce_simply(kernel, TypeParam::kDType, op, sources);
        for (std::size_t i = 0; i < 67; ++i) {
          ASSERT_EQ(is_nan(result[i]), i % 3 == 0) << kernel.instruction_set << ", op " << static_cast<int>(op)
                                                   << ", NaN in source " << s << ", element " << i;
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
  return reduce_simply(Kernel{reduce_instruction_set(), comm::reduce}, dtype, op, sources, scale)[0];
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

TEST(ReduceKernels, NeedAFloatingDTypeForAnAverageAndNothingElse) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      EXPECT_NO_THROW(check_reduction(dtype, op));
    }
    if (is_floating(dtype)) {
      EXPECT_NO_THROW(check_reduction(dtype, ReduceOp::kAvg));
    } else {
      EXPECT_THAT([dtype] { check_reduction(dtype, ReduceOp::kAvg); },
                  ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("average"), HasSubstr(name(dtype)))));
    }
  }
}

TEST(ReduceKernels, UseTheBestInstructionSetThatIsPresent) {
  EXPECT_EQ(reduce_instruction_set(), present_kernels().back().instruction_set);
}

}  // namespace
}  // namespace accelerate_cpp::comm
