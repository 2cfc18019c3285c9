#include "core/base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace accelerate_cpp {
namespace {

// A 16-bit floating format in the terms of IEEE 754, and conversions by arithmetic in double precision, which holds
// every value, midpoint and neighbour of both formats exactly.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint16_t infinity() const { return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }

  bool is_nan(std::uint16_t bits) const { return (bits & 0x7fff) > infinity(); }

  double value(std::uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    double magnitude = 0;
    if (exponent == (1 << exponent_bits) - 1) {
      magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      magnitude = std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    } else {
      magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
    }
    return std::copysign(magnitude, (bits & 0x8000) != 0 ? -1.0 : 1.0);
  }

  // The nearest value, ties to even; `value` is not NaN.
  std::uint16_t nearest(double value) const {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    if (std::isinf(value)) {
      return sign | infinity();
    }
    int exponent = 0;
    std::frexp(value, &exponent);
    const int power = std::max(exponent - 1, 1 - bias());
    const double steps = std::nearbyint(std::ldexp(std::abs(value), mantissa_bits - power));
    const long bits = (static_cast<long>(power + bias()) << mantissa_bits) + std::lround(steps) - (1L << mantissa_bits);
    return static_cast<std::uint16_t>(sign | (value == 0 ? 0 : std::min(bits, static_cast<long>(infinity()))));
  }
};

struct Half {
  static constexpr Format kFormat{5, 10};
  static float widen(std::uint16_t bits) { return to_float(Float16{bits}); }
  static std::uint16_t narrow(float value) { return to_float16(value).bits; }
};

struct Brain {
  static constexpr Format kFormat{8, 7};
  static float widen(std::uint16_t bits) { return to_float(BFloat16{bits}); }
  static std::uint16_t narrow(float value) { return to_bfloat16(value).bits; }
};

template <class Conversion>
class SixteenBits : public ::testing::Test {};
using Conversions = ::testing::Types<Half, Brain>;
TYPED_TEST_SUITE(SixteenBits, Conversions);

// Calls `check` with every pattern and stops at the first failure.
template <class Check>
void for_every_pattern(const Check& check) {
  for (std::uint32_t bits = 0; bits <= 0xffff && !::testing::Test::HasFailure(); ++bits) {
    check(static_cast<std::uint16_t>(bits));
  }
}

TYPED_TEST(SixteenBits, WidenToTheirExactValue) {
  for_every_pattern([](std::uint16_t bits) {
    const float widened = TypeParam::widen(bits);
    const double expected = TypeParam::kFormat.value(bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(widened)) << bits;
    } else {
      EXPECT_EQ(widened, expected) << bits;
      EXPECT_EQ(std::signbit(widened), std::signbit(expected)) << bits;
    }
  });
}

TYPED_TEST(SixteenBits, AreTheSameAfterWideningAndNarrowing) {
  for_every_pattern([](std::uint16_t bits) {
    const std::uint16_t back = TypeParam::narrow(TypeParam::widen(bits));
    if (TypeParam::kFormat.is_nan(bits)) {
      EXPECT_TRUE(TypeParam::kFormat.is_nan(back)) << bits;
    } else {
      EXPECT_EQ(back, bits);
    }
  });
}

TYPED_TEST(SixteenBits, RoundTheMiddleBetweenNeighboursToTheEvenOneAndAnythingElseToTheNearest) {
  for_every_pattern([](std::uint16_t bits) {
    const Format& format = TypeParam::kFormat;
    if ((bits & 0x7fff) >= format.infinity()) {
      return;
    }
    const auto next = static_cast<std::uint16_t>(bits + 1);  // away from zero
    const bool last = next % 0x8000 == format.infinity();
    const double beyond = std::copysign(std::ldexp(1.0, format.bias() + 1), format.value(bits));
    const double middle = (format.value(bits) + (last ? beyond : format.value(next))) / 2;
    const auto exact = static_cast<float>(middle);
    ASSERT_EQ(exact, middle);
    EXPECT_EQ(TypeParam::narrow(exact), bits % 2 == 0 ? bits : next) << bits;
    EXPECT_EQ(TypeParam::narrow(std::nextafter(exact, 0.0f)), bits) << bits;
    const float away = std::nextafter(exact, std::copysign(std::numeric_limits<float>::infinity(), exact));
    EXPECT_EQ(TypeParam::narrow(away), next) << bits;
  });
}

TYPED_TEST(SixteenBits, NarrowFloatsOfEveryMagnitudeToTheNearestValue) {
  constexpr std::uint32_t kStride = 4093;  // prime: passes through all exponents with changing low bits
  for (std::uint64_t bits = 0; bits <= 0xffffffffu && !this->HasFailure(); bits += kStride) {
    const float value = float_from_bits(static_cast<std::uint32_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(TypeParam::kFormat.is_nan(TypeParam::narrow(value))) << bits;
    } else {
      EXPECT_EQ(TypeParam::narrow(value), TypeParam::kFormat.nearest(value)) << bits;
    }
  }
}

TYPED_TEST(SixteenBits, KeepInfinitiesAndTheSignOfZero) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(TypeParam::narrow(infinity), TypeParam::kFormat.infinity());
  EXPECT_EQ(TypeParam::narrow(-infinity), TypeParam::kFormat.infinity() | 0x8000);
  EXPECT_EQ(TypeParam::narrow(0.0f), 0x0000);
  EXPECT_EQ(TypeParam::narrow(-0.0f), 0x8000);
  EXPECT_EQ(TypeParam::narrow(std::numeric_limits<float>::denorm_min()), 0x0000);
  EXPECT_EQ(TypeParam::narrow(-std::numeric_limits<float>::denorm_min()), 0x8000);
}

TYPED_TEST(SixteenBits, NarrowEveryKindOfNanToANan) {
  // The smallest and largest payloads, quiet and signalling: truncation would make infinities of some, and rounding
  // would carry others into the sign.
  for (const std::uint32_t bits : {0x7f800001u, 0x7f801fffu, 0x7f80ffffu, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu,
                                   0xff800001u, 0xffbfffffu, 0xffc00000u, 0xffffffffu}) {
    EXPECT_TRUE(TypeParam::kFormat.is_nan(TypeParam::narrow(float_from_bits(bits)))) << std::hex << bits;
  }
}

TEST(HalfBits, OfWellKnownValuesAreRight) {
  EXPECT_EQ(to_float16(1.0f).bits, 0x3c00);
  EXPECT_EQ(to_float16(-2.0f).bits, 0xc000);
  EXPECT_EQ(to_float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(to_float16(0x1p-25f).bits, 0x0000);
  EXPECT_EQ(to_float16(0x1.8p-24f).bits, 0x0002);
  EXPECT_EQ(to_bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bfloat16(-2.0f).bits, 0xc000);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

}  // namespace
}  // namespace accelerate_cpp
