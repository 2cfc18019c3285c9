// The arithmetic of the reductions, in vectors as wide as the instruction set has them (GCC's vector extension): the
// formats of elements, and the operations. Part of reduce_loops.h: compiled once per instruction set, in a namespace of
// its own, with internal linkage only.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/base/half.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm::ACCELERATE_KERNELS {
namespace {

#if defined(__AVX512F__)
inline constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr std::size_t kVectorBytes = 32;
#else
inline constexpr std::size_t kVectorBytes = 16;
#endif

template <class T, std::size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T, kVectorBytes>::Type;
using Floats = Vector<float>;
using Bits = Vector<std::uint32_t>;

// How `Elements`, a vector as it lies in memory, become one or two vectors of values to be combined, and back.
template <class T>
struct Same {
  using Value = T;
  using Elements = Vector<T>;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr int kParts = 1;
  static ACCELERATE_ALWAYS_INLINE void widen(Elements elements, Vector<T>* values) { values[0] = elements; }
  static ACCELERATE_ALWAYS_INLINE Elements narrow(const Vector<T>* values) { return values[0]; }
};

// Elements of even and of odd index become separate vectors, so that none has to change its place.
struct BFloat16AsFloat {
  using Value = float;
  using Elements = Bits;
  static constexpr std::size_t kElementBytes = sizeof(BFloat16);
  static constexpr int kParts = 2;
  static ACCELERATE_ALWAYS_INLINE void widen(Bits elements, Floats* values) {
    values[0] = __builtin_bit_cast(Floats, elements << 16);
    values[1] = __builtin_bit_cast(Floats, elements & 0xffff0000u);
  }
  static ACCELERATE_ALWAYS_INLINE Bits narrow(const Floats* values) {
    return (round_to_bfloat16<Floats, Bits>(values[0]) >> 16) |
           (round_to_bfloat16<Floats, Bits>(values[1]) & 0xffff0000u);
  }
};

#if defined(__F16C__) || defined(__AVX512F__)
// The instructions give the same bits as the arithmetic of half.h.
struct Float16AsFloat {
  using Value = float;
  using Elements = VectorOf<std::uint16_t, kVectorBytes / 2>::Type;
  static constexpr std::size_t kElementBytes = sizeof(Float16);
  static constexpr int kParts = 1;
  static ACCELERATE_ALWAYS_INLINE void widen(Elements elements, Floats* values) {
#if defined(__AVX512F__)
    // A mask of all lanes, because GCC 12 warns of the undefined ones that the plain intrinsic has.
    values[0] = __builtin_bit_cast(Floats, _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, elements)));
#else
    values[0] = __builtin_bit_cast(Floats, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, elements)));
#endif
  }
  static ACCELERATE_ALWAYS_INLINE Elements narrow(const Floats* values) {
#if defined(__AVX512F__)
    const __m512 value = __builtin_bit_cast(__m512, values[0]);
    return __builtin_bit_cast(Elements, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
#else
    const __m256 value = __builtin_bit_cast(__m256, values[0]);
    return __builtin_bit_cast(Elements, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#endif
  }
};
#else
struct Float16AsFloat {
  using Value = float;
  using Elements = Bits;
  static constexpr std::size_t kElementBytes = sizeof(Float16);
  static constexpr int kParts = 2;  // even and odd indices, as above
  static ACCELERATE_ALWAYS_INLINE void widen(Bits elements, Floats* values) {
    values[0] = widen_float16<Floats, Bits>(elements & 0xffffu);
    values[1] = widen_float16<Floats, Bits>(elements >> 16);
  }
  static ACCELERATE_ALWAYS_INLINE Bits narrow(const Floats* values) {
    return narrow_to_float16<Floats, Bits>(values[0]) | (narrow_to_float16<Floats, Bits>(values[1]) << 16);
  }
};
#endif

// An operation prepares the values of each source, combines them in the order of the sources, and finishes the result.
struct Operation {
  static constexpr bool kIsCommon = false;  // those that training spends its time in

  explicit Operation(const ReduceArguments&) {}
  template <class V>
  ACCELERATE_ALWAYS_INLINE V prepare(V value, int) const {
    return value;
  }
  template <class V>
  ACCELERATE_ALWAYS_INLINE V finish(V value) const {
    return value;
  }
};

struct Sum : Operation {
  using Operation::Operation;
  static constexpr bool kIsCommon = true;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a + b;
  }
};

template <class T>
struct ScaledSum : Sum {
  explicit ScaledSum(const ReduceArguments& arguments) : Sum(arguments), scale(static_cast<T>(arguments.scale)) {}
  ACCELERATE_ALWAYS_INLINE Vector<T> finish(Vector<T> value) const { return value * scale; }
  T scale;
};

template <class T>
struct WeightedSum : Sum {
  static constexpr bool kIsCommon = false;
  explicit WeightedSum(const ReduceArguments& arguments) : Sum(arguments), factors(arguments.factors) {}
  ACCELERATE_ALWAYS_INLINE Vector<T> prepare(Vector<T> value, int source) const {
    return value * static_cast<T>(factors[source]);
  }
  const double* factors;
};

struct Product : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a * b;
  }
};

// A NaN on either side is the result, as torch.minimum and torch.maximum have it.
struct Min : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct BitAnd : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a & b;
  }
};

struct BitOr : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a | b;
  }
};

struct BitXor : Operation {
  using Operation::Operation;
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a ^ b;
  }
};

}  // namespace
}  // namespace accelerate_cpp::comm::ACCELERATE_KERNELS
