// Reductions as the NCCL double computes them: plainly, one element after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/base/half.h"
#include "core/comm/nccl/nccl_api.h"

namespace accelerate_cpp::comm::testing {

inline std::size_t size_of(NcclDataType type) {
  switch (type) {
    case NcclDataType::kInt8:
    case NcclDataType::kUint8:
      return 1;
    case NcclDataType::kFloat16:
    case NcclDataType::kBfloat16:
      return 2;
    case NcclDataType::kInt32:
    case NcclDataType::kFloat32:
      return 4;
    case NcclDataType::kInt64:
    case NcclDataType::kFloat64:
      return 8;
  }
  return 0;
}

template <class T>
T load(const void* place) {
  T value;
  std::memcpy(&value, place, sizeof(value));
  return value;
}

inline double load_number(NcclDataType type, const void* place) {
  switch (type) {
    case NcclDataType::kInt8:
      return load<std::int8_t>(place);
    case NcclDataType::kUint8:
      return load<std::uint8_t>(place);
    case NcclDataType::kInt32:
      return load<std::int32_t>(place);
    case NcclDataType::kInt64:
      return static_cast<double>(load<std::int64_t>(place));
    case NcclDataType::kFloat16:
      return to_float(load<Float16>(place));
    case NcclDataType::kBfloat16:
      return to_float(load<BFloat16>(place));
    case NcclDataType::kFloat32:
      return load<float>(place);
    case NcclDataType::kFloat64:
      return load<double>(place);
  }
  return 0;
}

inline void store_number(NcclDataType type, double value, void* place) {
  const auto write = [place](auto number) { std::memcpy(place, &number, sizeof(number)); };
  switch (type) {
    case NcclDataType::kInt8:
      return write(static_cast<std::int8_t>(value));
    case NcclDataType::kUint8:
      return write(static_cast<std::uint8_t>(value));
    case NcclDataType::kInt32:
      return write(static_cast<std::int32_t>(value));
    case NcclDataType::kInt64:
      return write(static_cast<std::int64_t>(value));
    case NcclDataType::kFloat16:
      return write(to_float16(static_cast<float>(value)));
    case NcclDataType::kBfloat16:
      return write(to_bfloat16(static_cast<float>(value)));
    case NcclDataType::kFloat32:
      return write(static_cast<float>(value));
    case NcclDataType::kFloat64:
      return write(value);
  }
}

// One array per rank, each with the factor of its rank (1 but in pre-multiplied sums), reduced to `count` elements.
inline std::vector<std::byte> reduce_plainly(NcclDataType type, NcclRedOp op,
                                             const std::vector<const std::byte*>& arrays,
                                             const std::vector<double>& factors, std::size_t count) {
  const std::size_t element = size_of(type);
  std::vector<std::byte> result(count * element);
  for (std::size_t i = 0; i < count; ++i) {
    double value = factors[0] * load_number(type, arrays[0] + i * element);
    for (std::size_t r = 1; r < arrays.size(); ++r) {
      const double next = factors[r] * load_number(type, arrays[r] + i * element);
      if (op == NcclRedOp::kMax) {
        value = std::max(value, next);
      } else if (op == NcclRedOp::kMin) {
        value = std::min(value, next);
      } else {
        value = op == NcclRedOp::kProd ? value * next : value + next;
      }
    }
    store_number(type, op == NcclRedOp::kAvg ? value / static_cast<double>(arrays.size()) : value,
                 result.data() + i * element);
  }
  return result;
}

}  // namespace accelerate_cpp::comm::testing
