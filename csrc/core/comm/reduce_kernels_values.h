// The operations of the reductions, on vectors of values. Part of reduce_loops.h: compiled once per instruction set, in
// a namespace of its own, with internal linkage only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/vector_formats.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm::ACCELERATE_KERNELS {
namespace {

using namespace accelerate_cpp::ACCELERATE_KERNELS;  // NOLINT(google-build-using-namespace)

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
