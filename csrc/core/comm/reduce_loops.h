// The loops behind reduce(): compiled once per instruction set, inside namespace ACCELERATE_KERNELS, which the
// including file defines. Nothing here may have a definition that the linker could share between those files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/base/half.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm::ACCELERATE_KERNELS {
namespace {

inline constexpr std::size_t kBlock = 1024;  // elements combined in the first-level cache before they are stored

// How an element of memory becomes the value that is combined, and back.
template <class T>
struct Same {
  using Element = T;
  using Value = T;
  static ACCELERATE_ALWAYS_INLINE T load(T element) { return element; }
  static ACCELERATE_ALWAYS_INLINE T store(T value) { return value; }
};

// Integers are added and multiplied as wider unsigned ones: overflow wraps and nothing is undefined.
template <class T, class Wide>
struct Wrapping {
  using Element = T;
  using Value = Wide;
  static ACCELERATE_ALWAYS_INLINE Wide load(T element) { return static_cast<Wide>(element); }
  static ACCELERATE_ALWAYS_INLINE T store(Wide value) { return static_cast<T>(value); }
};

struct HalfAsFloat {
  using Element = Float16;
  using Value = float;
  static ACCELERATE_ALWAYS_INLINE float load(Float16 element) { return to_float(element); }
  static ACCELERATE_ALWAYS_INLINE Float16 store(float value) { return to_float16(value); }
};

struct BFloat16AsFloat {
  using Element = BFloat16;
  using Value = float;
  static ACCELERATE_ALWAYS_INLINE float load(BFloat16 element) { return to_float(element); }
  static ACCELERATE_ALWAYS_INLINE BFloat16 store(float value) { return to_bfloat16(value); }
};

struct Sum {
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a + b;
  }
};

struct Product {
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return a * b;
  }
};

// A NaN on either side is the result, as torch.minimum and torch.maximum have it.
struct Min {
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return (a < b || a != a) ? a : b;
  }
};

struct Max {
  template <class V>
  static ACCELERATE_ALWAYS_INLINE V combine(V a, V b) {
    return (a > b || a != a) ? a : b;
  }
};

template <class Access, class Op, bool kScaled>
ACCELERATE_ALWAYS_INLINE void combine_block(const ReduceArguments& arguments, std::size_t begin, std::size_t length,
                                            typename Access::Element* result) {
  using Element = typename Access::Element;
  using Value = typename Access::Value;
  Value sum[kBlock];
  const Element* first = static_cast<const Element*>(arguments.sources[0]) + begin;
  for (std::size_t i = 0; i < length; ++i) {
    sum[i] = Access::load(first[i]);
  }
  for (int s = 1; s < arguments.num_sources; ++s) {
    const Element* source = static_cast<const Element*>(arguments.sources[s]) + begin;
    for (std::size_t i = 0; i < length; ++i) {
      sum[i] = Op::combine(sum[i], Access::load(source[i]));
    }
  }
  if constexpr (kScaled) {
    const Value scale = static_cast<Value>(arguments.scale);
    for (std::size_t i = 0; i < length; ++i) {
      sum[i] = sum[i] * scale;
    }
  }
  for (std::size_t i = 0; i < length; ++i) {
    result[i] = Access::store(sum[i]);
  }
}

template <class Access, class Op, bool kScaled>
void reduce_loop(const ReduceArguments& arguments) {
  using Element = typename Access::Element;
  Element result[kBlock];
  for (std::size_t begin = 0; begin < arguments.count; begin += kBlock) {
    const std::size_t left = arguments.count - begin;
    const std::size_t length = left < kBlock ? left : kBlock;
    combine_block<Access, Op, kScaled>(arguments, begin, length, result);
    for (int d = 0; d < arguments.num_destinations; ++d) {
      std::memcpy(static_cast<Element*>(arguments.destinations[d]) + begin, result, length * sizeof(Element));
    }
  }
}

template <class Access>
void reduce_floating(ReduceOp op, const ReduceArguments& arguments) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return arguments.scale == 1.0 ? reduce_loop<Access, Sum, false>(arguments)
                                    : reduce_loop<Access, Sum, true>(arguments);
    case ReduceOp::kProduct:
      return reduce_loop<Access, Product, false>(arguments);
    case ReduceOp::kMin:
      return reduce_loop<Access, Min, false>(arguments);
    case ReduceOp::kMax:
      return reduce_loop<Access, Max, false>(arguments);
  }
}

template <class T, class Wide>
void reduce_integer(ReduceOp op, const ReduceArguments& arguments) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return reduce_loop<Wrapping<T, Wide>, Sum, false>(arguments);
    case ReduceOp::kProduct:
      return reduce_loop<Wrapping<T, Wide>, Product, false>(arguments);
    case ReduceOp::kMin:
      return reduce_loop<Same<T>, Min, false>(arguments);
    case ReduceOp::kMax:
      return reduce_loop<Same<T>, Max, false>(arguments);
  }
}

// Booleans are the bytes 0 and 1: their sum is "or", their product "and".
inline void reduce_bool(ReduceOp op, const ReduceArguments& arguments) {
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kAvg;
  return any ? reduce_loop<Same<std::uint8_t>, Max, false>(arguments)
             : reduce_loop<Same<std::uint8_t>, Min, false>(arguments);
}

}  // namespace

void reduce(DType dtype, ReduceOp op, const ReduceArguments& arguments) {
  switch (dtype) {
    case DType::kFloat32:
      return reduce_floating<Same<float>>(op, arguments);
    case DType::kFloat64:
      return reduce_floating<Same<double>>(op, arguments);
    case DType::kFloat16:
      return reduce_floating<HalfAsFloat>(op, arguments);
    case DType::kBFloat16:
      return reduce_floating<BFloat16AsFloat>(op, arguments);
    case DType::kInt8:
      return reduce_integer<std::int8_t, std::uint32_t>(op, arguments);
    case DType::kInt16:
      return reduce_integer<std::int16_t, std::uint32_t>(op, arguments);
    case DType::kInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(op, arguments);
    case DType::kInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(op, arguments);
    case DType::kUInt8:
      return reduce_integer<std::uint8_t, std::uint32_t>(op, arguments);
    case DType::kBool:
      return reduce_bool(op, arguments);
  }
}

}  // namespace accelerate_cpp::comm::ACCELERATE_KERNELS
