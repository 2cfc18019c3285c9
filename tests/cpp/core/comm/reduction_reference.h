// What the kernels are tested with: elements of every type, and the reduction in plain scalar arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "core/base/half.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {

struct Boolean {
  std::uint8_t value;
};

template <class T, DType kType>
struct Typed {
  using Element = T;
  static constexpr DType kDType = kType;
};

using FloatingElements = ::testing::Types<Typed<float, DType::kFloat32>, Typed<double, DType::kFloat64>,
                                          Typed<Float16, DType::kFloat16>, Typed<BFloat16, DType::kBFloat16>>;
using AllElements = ::testing::Types<Typed<float, DType::kFloat32>, Typed<double, DType::kFloat64>,
                                     Typed<Float16, DType::kFloat16>, Typed<BFloat16, DType::kBFloat16>,
                                     Typed<std::int8_t, DType::kInt8>, Typed<std::int16_t, DType::kInt16>,
                                     Typed<std::int32_t, DType::kInt32>, Typed<std::int64_t, DType::kInt64>,
                                     Typed<std::uint8_t, DType::kUInt8>, Typed<Boolean, DType::kBool>>;

// Those that check_reduction() accepts.
inline std::vector<ReduceOp> reductions_of(DType dtype) {
  if (is_floating(dtype)) {
    return {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPreMulSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};
  }
  return {ReduceOp::kSum,    ReduceOp::kProduct, ReduceOp::kMin,   ReduceOp::kMax,
          ReduceOp::kBitAnd, ReduceOp::kBitOr,   ReduceOp::kBitXor};
}

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
V combine_integers(ReduceOp op, V a, V b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return static_cast<V>(x * y);
    case ReduceOp::kBitAnd:
      return static_cast<V>(x & y);
    case ReduceOp::kBitOr:
      return static_cast<V>(x | y);
    case ReduceOp::kBitXor:
      return static_cast<V>(x ^ y);
    default:
      return static_cast<V>(x + y);
  }
}

template <class V>
V combine(ReduceOp op, V a, V b) {
  if constexpr (std::is_floating_point_v<V>) {
    const bool picks = op == ReduceOp::kMin || op == ReduceOp::kMax;
    if (picks && (std::isnan(a) || std::isnan(b))) {
      return std::numeric_limits<V>::quiet_NaN();
    }
    return op == ReduceOp::kMin       ? std::min(a, b)
           : op == ReduceOp::kMax     ? std::max(a, b)
           : op == ReduceOp::kProduct ? a * b
                                      : a + b;
  } else {
    return combine_integers(op, a, b);
  }
}

inline Boolean combine(ReduceOp op, Boolean a, Boolean b) {
  const bool all = op == ReduceOp::kMin || op == ReduceOp::kProduct || op == ReduceOp::kBitAnd;
  const int value = op == ReduceOp::kBitXor ? a.value ^ b.value : all ? a.value & b.value : a.value | b.value;
  return {static_cast<std::uint8_t>(value)};
}

// One factor per source, none of them a power of two.
inline std::vector<double> some_factors(std::size_t num_sources) {
  std::vector<double> factors;
  for (std::size_t s = 0; s < num_sources; ++s) {
    factors.push_back(0.7 - 0.3 * static_cast<double>(s));
  }
  return factors;
}

// The scale that the tests give to `op`.
inline double some_scale(ReduceOp op) {
  return op == ReduceOp::kAvg ? 1.0 / 3 : 1.0;
}

// Element `index` of the reduction with some_factors() and some_scale(), one plain scalar operation after the other.
template <class T>
T expected(ReduceOp op, const std::vector<std::vector<T>>& sources, std::size_t index) {
  const std::vector<double> factors = some_factors(sources.size());
  const auto prepared = [&](std::size_t source) {
    auto value = widen(sources[source][index]);
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      if (op == ReduceOp::kPreMulSum) {
        volatile auto product = value * static_cast<decltype(value)>(factors[source]);  // not fused with the addition
        value = product;
      }
    }
    return value;
  };
  auto value = prepared(0);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    value = combine(op, value, prepared(s));
  }
  if constexpr (std::is_floating_point_v<decltype(value)>) {
    value = op == ReduceOp::kAvg ? value * static_cast<decltype(value)>(some_scale(op)) : value;
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

template <class T>
bool same_bits(const T* a, const T* b, std::size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
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

// Elements of any bits: subnormal ones, infinities and NaNs of every payload among them.
template <class T>
T random_bits(std::mt19937_64& random) {
  const std::uint64_t bits = random();
  T element{};
  std::memcpy(&element, &bits, sizeof(T));
  if constexpr (std::is_same_v<T, Boolean>) {
    element.value &= 1;
  }
  return element;
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

// Calls the kernel on typed arrays, with some_factors() and, unless it is given, some_scale().
template <class T>
void call(const ReduceKernels& kernel, DType dtype, ReduceOp op, const std::vector<const T*>& sources,
          const std::vector<T*>& destinations, std::size_t count, double scale) {
  const std::vector<const void*> from(sources.begin(), sources.end());
  const std::vector<void*> to(destinations.begin(), destinations.end());
  const std::vector<double> factors = some_factors(sources.size());
  kernel.reduce(dtype, op,
                {from.data(), static_cast<int>(from.size()), to.data(), static_cast<int>(to.size()), count, scale,
                 op == ReduceOp::kPreMulSum ? factors.data() : nullptr});
}

template <class T>
void call(const ReduceKernels& kernel, DType dtype, ReduceOp op, const std::vector<const T*>& sources,
          const std::vector<T*>& destinations, std::size_t count) {
  call(kernel, dtype, op, sources, destinations, count, some_scale(op));
}

// Into one new array.
template <class T>
std::vector<T> reduce_simply(const ReduceKernels& kernel, DType dtype, ReduceOp op,
                             const std::vector<std::vector<T>>& sources, double scale) {
  std::vector<const T*> pointers;
  for (const std::vector<T>& source : sources) {
    pointers.push_back(source.data());
  }
  std::vector<T> result(sources[0].size());
  call<T>(kernel, dtype, op, pointers, {result.data()}, result.size(), scale);
  return result;
}

}  // namespace accelerate_cpp::comm
