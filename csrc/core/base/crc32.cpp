#include "core/base/crc32.h"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace accelerate_cpp {
namespace {

constexpr std::size_t kWordBytes = 8;
using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: what a byte b contributes that k further bytes follow.
constexpr std::array<Table, kWordBytes> make_tables() {
  std::array<Table, kWordBytes> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0xEDB88320U : 0U);
    }
    tables[0][byte] = rest;
  }
  for (std::size_t following = 1; following < kWordBytes; ++following) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[following - 1][byte];
      tables[following][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr std::array<Table, kWordBytes> kTables = make_tables();

// `state` is the complement of the checksum.
std::uint32_t by_tables(std::uint32_t state, const unsigned char* bytes, std::size_t size_bytes) {
  for (; size_bytes >= kWordBytes; size_bytes -= kWordBytes, bytes += kWordBytes) {
    std::uint32_t next = 0;
    for (std::size_t place = 0; place < kWordBytes; ++place) {
      const std::uint32_t own = place < 4 ? (state >> (8 * place)) & 0xFF : 0;
      next ^= kTables[kWordBytes - 1 - place][bytes[place] ^ own];
    }
    state = next;
  }
  for (; size_bytes > 0; --size_bytes, ++bytes) {
    state = (state >> 8) ^ kTables[0][(state ^ *bytes) & 0xFF];
  }
  return state;
}

#if defined(__x86_64__)
constexpr std::size_t kLaneBytes = 16;
constexpr std::size_t kBlockBytes = 4 * kLaneBytes;

__m128i load(const unsigned char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// `folded`, moved on by the distance that `factors` stand for, with what lies there.
__attribute__((target("pclmul,sse4.1"))) inline __m128i folded_onto(__m128i folded, __m128i factors, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(folded, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(folded, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(high, low), there);
}

// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with its
// constants for this polynomial: four lanes are folded over 64 bytes at a time, then into one, which Barrett's
// reduction brings down to 32 bits. At least kBlockBytes, in whole lanes.
__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_multiplication(std::uint32_t state,
                                                                         const unsigned char* bytes,
                                                                         std::size_t size_bytes) {
  const __m128i over_block = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i over_lane = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i to_64_bits = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i reduction = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i first = _mm_xor_si128(load(bytes), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i second = load(bytes + kLaneBytes);
  __m128i third = load(bytes + 2 * kLaneBytes);
  __m128i fourth = load(bytes + 3 * kLaneBytes);
  bytes += kBlockBytes;
  size_bytes -= kBlockBytes;
  for (; size_bytes >= kBlockBytes; size_bytes -= kBlockBytes, bytes += kBlockBytes) {
    first = folded_onto(first, over_block, load(bytes));
    second = folded_onto(second, over_block, load(bytes + kLaneBytes));
    third = folded_onto(third, over_block, load(bytes + 2 * kLaneBytes));
    fourth = folded_onto(fourth, over_block, load(bytes + 3 * kLaneBytes));
  }
  __m128i rest = folded_onto(first, over_lane, second);
  rest = folded_onto(rest, over_lane, third);
  rest = folded_onto(rest, over_lane, fourth);
  for (; size_bytes >= kLaneBytes; size_bytes -= kLaneBytes, bytes += kLaneBytes) {
    rest = folded_onto(rest, over_lane, load(bytes));
  }
  rest = _mm_xor_si128(_mm_srli_si128(rest, 8), _mm_clmulepi64_si128(rest, over_lane, 0x10));
  rest = _mm_xor_si128(_mm_srli_si128(rest, 4), _mm_clmulepi64_si128(_mm_and_si128(rest, low_words), to_64_bits, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(rest, low_words), reduction, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), reduction, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(rest, quotient), 1));
}

bool can_multiply() {
  static const bool can = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  return can;
}
#endif

}  // namespace

std::uint32_t crc32(std::uint32_t before, const void* bytes, std::size_t size_bytes) {
#if defined(__x86_64__)
  if (size_bytes >= kBlockBytes && can_multiply()) {
    const auto* const begin = static_cast<const unsigned char*>(bytes);
    const std::size_t in_lanes = size_bytes / kLaneBytes * kLaneBytes;
    return ~by_tables(by_multiplication(~before, begin, in_lanes), begin + in_lanes, size_bytes - in_lanes);
  }
#endif
  return crc32_portable(before, bytes, size_bytes);
}

std::uint32_t crc32_portable(std::uint32_t before, const void* bytes, std::size_t size_bytes) {
  return ~by_tables(~before, static_cast<const unsigned char*>(bytes), size_bytes);
}

}  // namespace accelerate_cpp
