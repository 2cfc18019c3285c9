// Elements as vectors of values to compute with, as wide as the instruction set allows (GCC's vector extension).
// Compiled once per instruction set, inside namespace ACCELERATE_KERNELS, which the including file defines; nothing
// here may have a definition that the linker could share between those files.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/base/half.h"

namespace accelerate_cpp::ACCELERATE_KERNELS {
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

// How `Elements`, a vector as it lies in memory, become one or two vectors of values, and back.
template <class T>
struct Same {
  using Value = T;
  using Elements = Vector<T>;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr int kParts = 1;
  static ACCELERATE_ALWAYS_INLINE void widen(Elements elements, Vector<T>* values) { values[0] = elements; }
  static ACCELERATE_ALWAYS_INLINE Elements narrow(const Vector<T>* values) { return values[0]; }
};

// Elements of even and of odd index become separate vectors, so that no element has to move.
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

// A vector anywhere in memory. (Compilers take memcpy apart into smaller pieces.)
template <class V>
struct __attribute__((packed, may_alias)) Unaligned {
  V vector;
};

// How vectors are loaded and stored.
struct ThroughCache {
  template <class V>
  ACCELERATE_ALWAYS_INLINE V load(const char* from) const {
    return reinterpret_cast<const Unaligned<V>*>(from)->vector;
  }
  template <class V>
  ACCELERATE_ALWAYS_INLINE void store(char* to, V vector) const {
    reinterpret_cast<Unaligned<V>*>(to)->vector = vector;
  }
};

// The first `bytes` of a vector.
struct Partial {
  template <class V>
  ACCELERATE_ALWAYS_INLINE V load(const char* from) const {
    V vector{};
    __builtin_memcpy(&vector, from, bytes);
    return vector;
  }
  template <class V>
  ACCELERATE_ALWAYS_INLINE void store(char* to, V vector) const {
    __builtin_memcpy(to, &vector, bytes);
  }
  std::size_t bytes;
};

}  // namespace
}  // namespace accelerate_cpp::ACCELERATE_KERNELS
