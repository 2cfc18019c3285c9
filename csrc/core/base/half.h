// Conversions between float and the two 16-bit floating formats. Rounding is to nearest, ties to even; NaNs become
// quiet NaNs; nothing depends on whether the processor flushes denormal floats to zero.
//
// The arithmetic is branch-free and written once for single values and for vectors of them (GCC's vector extension):
// `Float` and `Bits` are float and std::uint32_t, or vectors of as many of each. Every function is always inlined: the
// same header is compiled for several instruction sets, and no shared copy may be left for the linker to choose.
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

// The float nearest to `value` that a bfloat16 can hold, in the upper half of its bits; the lower half is left over.
// Any NaN becomes the bfloat16 0x7fc0.
template <class Float, class Bits>
ACCELERATE_ALWAYS_INLINE Bits round_to_bfloat16(Float value) {
  const Bits bits = __builtin_bit_cast(Bits, value);
  const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? Bits{} + 0x7fc00000u : rounded;
}

// The value of the Float16 in the lower half of `half`, whose upper half is zero.
template <class Float, class Bits>
ACCELERATE_ALWAYS_INLINE Float widen_float16(Bits half) {
  const Bits sign = (half & 0x8000u) << 16;
  const Bits magnitude = (half & 0x7fffu) << 13;
  const Bits normal = magnitude + (112u << 23);  // the exponents differ by 112
  // With the exponent of 2^-14 and its implied one, which is then subtracted, a subnormal half is 2^-14 too large.
  const Bits subnormal = __builtin_bit_cast(Bits, __builtin_bit_cast(Float, normal + (1u << 23)) - 0x1p-14f);
  const Bits infinity = normal + (112u << 23);
  const Bits special = magnitude > Bits{} + 0x0f800000u ? infinity | 0x00400000u : infinity;
  const Bits finite = magnitude < Bits{} + 0x00800000u ? subnormal : normal;
  return __builtin_bit_cast(Float, sign | (magnitude < Bits{} + 0x0f800000u ? finite : special));
}

// The Float16 nearest to `value`, in the lower half of the bits returned; the upper half is zero. NaNs keep their sign
// and the upper bits of their payload.
template <class Float, class Bits>
ACCELERATE_ALWAYS_INLINE Bits narrow_to_float16(Float value) {
  const Bits bits = __builtin_bit_cast(Bits, value);
  const Bits sign = (bits >> 16) & 0x8000u;
  const Bits magnitude = bits & 0x7fffffffu;
  const Bits rebiased = magnitude - (112u << 23);
  const Bits normal = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
  // Adding 0.5, whose last place is the smallest half (2^-24), lets the floating-point adder do the rounding.
  const Bits subnormal = __builtin_bit_cast(Bits, __builtin_bit_cast(Float, magnitude) + 0.5f) - 0x3f000000u;
  const Bits infinity = Bits{} + 0x7c00u;
  const Bits special = magnitude > Bits{} + 0x7f800000u ? ((magnitude >> 13) & 0x3ffu) | 0x7e00u : infinity;
  const Bits finite = magnitude < Bits{} + 0x38800000u ? subnormal : normal;
  return sign | (magnitude < Bits{} + 0x47800000u ? finite : special);
}

ACCELERATE_ALWAYS_INLINE float to_float(BFloat16 value) {
  return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

ACCELERATE_ALWAYS_INLINE BFloat16 to_bfloat16(float value) {
  return {static_cast<std::uint16_t>(round_to_bfloat16<float, std::uint32_t>(value) >> 16)};
}

ACCELERATE_ALWAYS_INLINE float to_float(Float16 value) {
  return widen_float16<float, std::uint32_t>(value.bits);
}

ACCELERATE_ALWAYS_INLINE Float16 to_float16(float value) {
  return {static_cast<std::uint16_t>(narrow_to_float16<float, std::uint32_t>(value))};
}

}  // namespace accelerate_cpp
