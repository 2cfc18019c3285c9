// Conversions between float and the two 16-bit floating formats, branch-free so that loops over them vectorise.
// Rounding is to nearest, ties to even. Every function is always inlined: the same header is compiled for several
// instruction sets, and no shared copy may be left for the linker to choose.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define ACCELERATE_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ACCELERATE_ALWAYS_INLINE inline
#endif

namespace accelerate_cpp {

struct Float16 {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

ACCELERATE_ALWAYS_INLINE float float_from_bits(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

ACCELERATE_ALWAYS_INLINE std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

ACCELERATE_ALWAYS_INLINE float to_float(BFloat16 value) {
  return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

ACCELERATE_ALWAYS_INLINE BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

ACCELERATE_ALWAYS_INLINE float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  // The exponent fields differ by 112, so a multiplication by 2^112 maps normal and subnormal halves alike.
  const std::uint32_t finite = bits_of(float_from_bits(magnitude) * 0x1p112f);
  const bool is_finite = magnitude < 0x0f800000u;
  return float_from_bits(sign | (is_finite ? finite : magnitude | 0x7f800000u));
}

ACCELERATE_ALWAYS_INLINE Float16 to_float16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t rebiased = magnitude - (112u << 23);
  const std::uint32_t normal = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
  // Adding 0.5, whose last place is the smallest half (2^-24), lets the floating-point adder do the rounding.
  const std::uint32_t subnormal = bits_of(float_from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<std::uint16_t>(sign | (magnitude < 0x47800000u ? finite : special))};
}

}  // namespace accelerate_cpp
