// The loops behind reduce(): compiled once per instruction set, inside namespace ACCELERATE_KERNELS, which the
// including file defines. Nothing here may have a definition that the linker could share between those files.
//
// A group of a few vectors is loaded from every source, combined in registers, and stored to every destination before
// the next group is looked at: memory is read once and written once, and a destination may be a source.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "core/comm/reduce_kernels.h"
#include "core/comm/reduce_kernels_values.h"

namespace accelerate_cpp::comm::ACCELERATE_KERNELS {
namespace {

inline constexpr std::size_t kLineBytes = 64;
inline constexpr int kGroupValues = 8;  // vectors of values in a group: as many as leave registers for the arithmetic

// From this size on, the operands do not fit into a core's second-level cache and its share of the third, and results
// are better stored past the caches: that avoids reading the lines that are overwritten (half the time at 16 MiB). But
// never into lines that have just been read as a source: that takes 1.2 times (slices of 50 MB) to seven times (0.5 MB)
// as long.
inline constexpr std::size_t kStreamingBytes = std::size_t{8} << 20;

// The arrays of a reduction: any number of them, or numbers known here, whose addresses then stay in registers.
struct AnyArrays {
  explicit AnyArrays(const ReduceArguments& arguments)
      : sources(arguments.sources),
        destinations(arguments.destinations),
        num_sources(arguments.num_sources),
        num_destinations(arguments.num_destinations) {}
  ACCELERATE_ALWAYS_INLINE const char* source(int s) const { return static_cast<const char*>(sources[s]); }
  ACCELERATE_ALWAYS_INLINE char* destination(int d) const { return static_cast<char*>(destinations[d]); }

  const void* const* sources;
  void* const* destinations;
  int num_sources;
  int num_destinations;
};

template <int kSources, int kDestinations>
struct FixedArrays {
  explicit FixedArrays(const AnyArrays& arrays) {
    for (int s = 0; s < kSources; ++s) {
      sources[s] = arrays.source(s);
    }
    for (int d = 0; d < kDestinations; ++d) {
      destinations[d] = arrays.destination(d);
    }
  }
  ACCELERATE_ALWAYS_INLINE const char* source(int s) const { return sources[s]; }
  ACCELERATE_ALWAYS_INLINE char* destination(int d) const { return destinations[d]; }

  const char* sources[kSources];
  char* destinations[kDestinations];
  static constexpr int num_sources = kSources;
  static constexpr int num_destinations = kDestinations;
};

// Stores past the caches; destinations are aligned to lines, and finish() makes them visible to other threads in order.
struct Streaming : ThroughCache {
#if defined(__SSE2__)
  template <class V>
  ACCELERATE_ALWAYS_INLINE void store(char* to, V vector) const {
    if constexpr (sizeof(V) == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), __builtin_bit_cast(__m128i, vector));
    }
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __builtin_bit_cast(__m256i, vector));
    }
#endif
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), __builtin_bit_cast(__m512i, vector));
    }
#endif
  }
  static void finish() { _mm_sfence(); }
#else
  static void finish() {}
#endif
};

// Reduces kSteps vectors of elements at `offset` bytes from the beginning of the arrays.
template <class Access, int kSteps, class Op, class Arrays, class Transfer>
ACCELERATE_ALWAYS_INLINE void reduce_group(const Op& op, const Arrays& arrays, const Transfer& transfer,
                                           std::size_t offset) {
  using Elements = typename Access::Elements;
  constexpr int kParts = Access::kParts;
  Vector<typename Access::Value> values[kSteps * kParts];
#pragma GCC unroll 8
  for (int i = 0; i < kSteps; ++i) {
    const char* const from = arrays.source(0) + offset + i * sizeof(Elements);
    Access::widen(transfer.template load<Elements>(from), values + i * kParts);
#pragma GCC unroll 2
    for (int p = i * kParts; p < (i + 1) * kParts; ++p) {
      values[p] = op.prepare(values[p], 0);
    }
  }
  for (int s = 1; s < arrays.num_sources; ++s) {
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
      Vector<typename Access::Value> next[kParts];
      Access::widen(transfer.template load<Elements>(arrays.source(s) + offset + i * sizeof(Elements)), next);
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) {
        values[i * kParts + p] = op.combine(values[i * kParts + p], op.prepare(next[p], s));
      }
    }
  }
  Elements elements[kSteps];
#pragma GCC unroll 8
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 2
    for (int p = i * kParts; p < (i + 1) * kParts; ++p) {
      values[p] = op.finish(values[p]);
    }
    elements[i] = Access::narrow(values + i * kParts);
  }
  for (int d = 0; d < arrays.num_destinations; ++d) {
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) {
      transfer.store(arrays.destination(d) + offset + i * sizeof(Elements), elements[i]);
    }
  }
}

// The elements from `begin` to `end`, in bytes, one vector at a time.
template <class Access, class Op>
void reduce_slowly(const Op& op, const AnyArrays& arrays, std::size_t begin, std::size_t end) {
  constexpr std::size_t kStep = sizeof(typename Access::Elements);
  for (; end - begin >= kStep; begin += kStep) {
    reduce_group<Access, 1>(op, arrays, ThroughCache{}, begin);
  }
  if (begin < end) {
    reduce_group<Access, 1>(op, arrays, Partial{end - begin}, begin);
  }
}

// As many whole groups as there are between `begin` and `end`; returns where they end.
template <class Access, class Op, class Arrays, class Transfer>
std::size_t reduce_groups(const Op& op, const Arrays arrays, const Transfer& transfer, std::size_t begin,
                          std::size_t end) {
  constexpr int kSteps = kGroupValues / Access::kParts;
  constexpr std::size_t kGroup = kSteps * sizeof(typename Access::Elements);
  for (; end - begin >= kGroup; begin += kGroup) {
    reduce_group<Access, kSteps>(op, arrays, transfer, begin);
  }
  return begin;
}

std::size_t beyond_line(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kLineBytes;
}

// Whether results are stored past the caches: if there are many, none of them replaces a source, and all lie alike in
// their cache lines.
bool streams(const ReduceArguments& arguments, std::size_t bytes) {
  const int num_arrays = arguments.num_sources + arguments.num_destinations;
  if (arguments.num_destinations == 0 || bytes < kStreamingBytes / static_cast<std::size_t>(num_arrays)) {
    return false;
  }
  for (int d = 0; d < arguments.num_destinations; ++d) {
    const void* const destination = arguments.destinations[d];
    for (int s = 0; s < arguments.num_sources; ++s) {
      if (destination == arguments.sources[s]) {
        return false;
      }
    }
    if (beyond_line(destination) != beyond_line(arguments.destinations[0])) {
      return false;
    }
  }
  return true;
}

// Groups past the caches, and what lies before the first whole line of the destinations; returns where they end.
template <class Access, class Op>
std::size_t stream_groups(const Op& op, const AnyArrays& arrays, std::size_t bytes) {
  const std::size_t first_line = (kLineBytes - beyond_line(arrays.destination(0))) % kLineBytes;
  reduce_slowly<Access>(op, arrays, 0, first_line);
  const std::size_t end = reduce_groups<Access>(op, arrays, Streaming{}, first_line, bytes);
  Streaming::finish();
  return end;
}

// As many whole groups as there are in `bytes`; returns where they end. Only the common operations have loops for
// special cases, for each is compiled for every format.
template <class Access, class Op>
std::size_t all_groups(const Op& op, const ReduceArguments& arguments, std::size_t bytes) {
  const AnyArrays arrays(arguments);
  if constexpr (Op::kIsCommon) {
    if (streams(arguments, bytes)) {
      return stream_groups<Access>(op, arrays, bytes);
    }
    if (arrays.num_sources == 2 && arrays.num_destinations == 1) {
      return reduce_groups<Access>(op, FixedArrays<2, 1>(arrays), ThroughCache{}, 0, bytes);
    }
    if (arrays.num_sources == 2 && arrays.num_destinations == 2) {
      return reduce_groups<Access>(op, FixedArrays<2, 2>(arrays), ThroughCache{}, 0, bytes);
    }
  }
  return reduce_groups<Access>(op, arrays, ThroughCache{}, 0, bytes);
}

template <class Access, class Op>
void reduce_with(const ReduceArguments& arguments) {
  const Op op(arguments);
  const std::size_t bytes = arguments.count * Access::kElementBytes;
  const std::size_t end = all_groups<Access>(op, arguments, bytes);
  reduce_slowly<Access>(op, AnyArrays(arguments), end, bytes);
}

template <class Access>
void reduce_floating(ReduceOp op, const ReduceArguments& arguments) {
  using Value = typename Access::Value;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return arguments.scale == 1.0 ? reduce_with<Access, Sum>(arguments)
                                    : reduce_with<Access, ScaledSum<Value>>(arguments);
    case ReduceOp::kPreMulSum:
      return reduce_with<Access, WeightedSum<Value>>(arguments);
    case ReduceOp::kProduct:
      return reduce_with<Access, Product>(arguments);
    case ReduceOp::kMin:
      return reduce_with<Access, Min>(arguments);
    case ReduceOp::kMax:
      return reduce_with<Access, Max>(arguments);
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return;  // refused by check_reduction
  }
}

// Integers are combined as unsigned ones of the same width, so that overflow wraps, except where the sign matters.
template <class T, class Unsigned>
void reduce_integer(ReduceOp op, const ReduceArguments& arguments) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_with<Same<Unsigned>, Sum>(arguments);
    case ReduceOp::kProduct:
      return reduce_with<Same<Unsigned>, Product>(arguments);
    case ReduceOp::kMin:
      return reduce_with<Same<T>, Min>(arguments);
    case ReduceOp::kMax:
      return reduce_with<Same<T>, Max>(arguments);
    case ReduceOp::kBitAnd:
      return reduce_with<Same<Unsigned>, BitAnd>(arguments);
    case ReduceOp::kBitOr:
      return reduce_with<Same<Unsigned>, BitOr>(arguments);
    case ReduceOp::kBitXor:
      return reduce_with<Same<Unsigned>, BitXor>(arguments);
    case ReduceOp::kAvg:
    case ReduceOp::kPreMulSum:
      return;  // refused by check_reduction
  }
}

// Booleans are the bytes 0 and 1: their sum and maximum are "or", their product and minimum "and".
void reduce_bool(ReduceOp op, const ReduceArguments& arguments) {
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
  const bool all = op == ReduceOp::kProduct || op == ReduceOp::kMin;
  reduce_integer<std::uint8_t, std::uint8_t>(any ? ReduceOp::kBitOr : all ? ReduceOp::kBitAnd : op, arguments);
}

}  // namespace

void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments) {
  switch (dtype) {
    case DType::kFloat32:
      return reduce_floating<Same<float>>(op, arguments);
    case DType::kFloat64:
      return reduce_floating<Same<double>>(op, arguments);
    case DType::kFloat16:
      return reduce_floating<Float16AsFloat>(op, arguments);
    case DType::kBFloat16:
      return reduce_floating<BFloat16AsFloat>(op, arguments);
    case DType::kInt8:
      return reduce_integer<std::int8_t, std::uint8_t>(op, arguments);
    case DType::kInt16:
      return reduce_integer<std::int16_t, std::uint16_t>(op, arguments);
    case DType::kInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(op, arguments);
    case DType::kInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(op, arguments);
    case DType::kUInt8:
      return reduce_integer<std::uint8_t, std::uint8_t>(op, arguments);
    case DType::kBool:
      return reduce_bool(op, arguments);
  }
}

}  // namespace accelerate_cpp::comm::ACCELERATE_KERNELS
