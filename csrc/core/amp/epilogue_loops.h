// The loops behind scale_gradient(): compiled once per instruction set, inside namespace ACCELERATE_KERNELS, which the
// including file defines. Nothing here may have a definition that the linker could share between those files.
//
// A row of 64 bytes (one line of a cache; half of one where halves are widened by an instruction) is taken at a time,
// as one, two or four vectors. The squares of each of its elements are summed separately, in double, and these sums are
// added up in the same order at the end, so that the width of a vector does not show in the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/amp/gradient_epilogue.h"
#include "core/base/vector_formats.h"

namespace accelerate_cpp::amp::ACCELERATE_KERNELS {
namespace {

using namespace accelerate_cpp::ACCELERATE_KERNELS;  // NOLINT(google-build-using-namespace)

using Doubles = Vector<double>;

// The sums for one vector of values.
template <class Value>
struct Sums;

template <>
struct Sums<float> {
  static constexpr int kLanes = kVectorBytes / sizeof(float);
  using Half = typename VectorOf<float, kVectorBytes / 2>::Type;
  struct Halves {
    Half low;
    Half high;
  };

  ACCELERATE_ALWAYS_INLINE void add(Floats values) {
    const Halves halves = __builtin_bit_cast(Halves, values);
    const Doubles first = __builtin_convertvector(halves.low, Doubles);
    const Doubles second = __builtin_convertvector(halves.high, Doubles);
    low += first * first;
    high += second * second;
    non_finite -= (values - values) != 0.0f;
  }
  double squares(int lane) const { return lane < kLanes / 2 ? low[lane] : high[lane - kLanes / 2]; }
  std::uint64_t count(int lane) const { return static_cast<std::uint32_t>(non_finite[lane]); }

  Doubles low{};
  Doubles high{};
  Vector<std::int32_t> non_finite{};
};

template <>
struct Sums<double> {
  static constexpr int kLanes = kVectorBytes / sizeof(double);

  ACCELERATE_ALWAYS_INLINE void add(Doubles values) {
    sums += values * values;
    non_finite -= (values - values) != 0.0;
  }
  double squares(int lane) const { return sums[lane]; }
  std::uint64_t count(int lane) const { return static_cast<std::uint64_t>(non_finite[lane]); }

  Doubles sums{};
  Vector<std::int64_t> non_finite{};
};

// The number of rows for which the 32-bit counts of `Sums` are enough.
inline constexpr std::size_t kRowsPerRound = std::size_t{1} << 30;

template <class Access, bool kWrites>
class Epilogue {
 public:
  using Value = typename Access::Value;
  using Elements = typename Access::Elements;
  static constexpr int kVectors = 64 / kVectorBytes;
  static constexpr std::size_t kRowBytes = kVectors * sizeof(Elements);

  explicit Epilogue(double factor) : factor_(static_cast<Value>(factor)) {}

  GradientStatistics run(char* data, std::size_t bytes) {
    std::size_t begin = 0;
    for (std::size_t rows = 0; bytes - begin >= kRowBytes; begin += kRowBytes) {
      take_row(data + begin, ThroughCache{});
      if (++rows == kRowsPerRound) {
        collect();
        rows = 0;
      }
    }
    take_rest(data + begin, bytes - begin);
    collect();
    return total_;
  }

 private:
  template <class Transfer>
  ACCELERATE_ALWAYS_INLINE void take_vector(char* place, int vector, const Transfer& transfer) {
    Vector<Value> values[Access::kParts];
    Access::widen(transfer.template load<Elements>(place), values);
    for (int p = 0; p < Access::kParts; ++p) {
      if (kWrites) {
        values[p] = values[p] * factor_;
      }
      sums_[vector][p].add(values[p]);
    }
    if (kWrites) {
      transfer.store(place, Access::narrow(values));
    }
  }

  template <class Transfer>
  ACCELERATE_ALWAYS_INLINE void take_row(char* row, const Transfer& transfer) {
    for (int v = 0; v < kVectors; ++v) {
      take_vector(row + v * sizeof(Elements), v, transfer);
    }
  }

  void take_rest(char* data, std::size_t bytes) {
    for (int v = 0; bytes > 0; ++v) {
      const std::size_t part = bytes < sizeof(Elements) ? bytes : sizeof(Elements);
      take_vector(data, v, Partial{part});
      data += part;
      bytes -= part;
    }
  }

  void collect() {
    for (int p = 0; p < Access::kParts; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        for (int lane = 0; lane < Sums<Value>::kLanes; ++lane) {
          total_.sum_of_squares += sums_[v][p].squares(lane);
          total_.num_non_finite += sums_[v][p].count(lane);
        }
        sums_[v][p] = {};
      }
    }
  }

  const Value factor_;
  Sums<Value> sums_[kVectors][Access::kParts];
  GradientStatistics total_;
};

template <class Access>
GradientStatistics run_as(void* data, std::size_t count, double factor, bool writes) {
  const std::size_t bytes = count * Access::kElementBytes;
  return writes ? Epilogue<Access, true>(factor).run(static_cast<char*>(data), bytes)
                : Epilogue<Access, false>(factor).run(static_cast<char*>(data), bytes);
}

}  // namespace

GradientStatistics run(DType dtype, void* data, std::size_t count, double factor, bool writes) {
  switch (dtype) {
    case DType::kFloat32:
      return run_as<Same<float>>(data, count, factor, writes);
    case DType::kFloat64:
      return run_as<Same<double>>(data, count, factor, writes);
    case DType::kFloat16:
      return run_as<Float16AsFloat>(data, count, factor, writes);
    case DType::kBFloat16:
      return run_as<BFloat16AsFloat>(data, count, factor, writes);
    default:
      return {};  // refused by the callers
  }
}

}  // namespace accelerate_cpp::amp::ACCELERATE_KERNELS
