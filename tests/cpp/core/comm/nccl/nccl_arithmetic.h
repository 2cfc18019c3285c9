// Reductions as the NCCL double computes them: plainly, one element after the other.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "core/base/half.h"
#include "core/comm/nccl/nccl_api.h"

namespace accelerate_cpp::comm::testing {

inline std::size_t size_of(NcclDataType type) {
  switch (type) {
    case NcclDataType::kUint8:
      return 1;
    case NcclDataType::kFloat16:
    case NcclDataType::kBfloat16:
      return 2;
    case NcclDataType::kFloat32:
      return 4;
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
    case NcclDataType::kFloat16:
      return to_float(load<Float16>(place));
    case NcclDataType::kBfloat16:
      return to_float(load<BFloat16>(place));
    case NcclDataType::kFloat32:
      return load<float>(place);
    default:
      return load<double>(place);
  }
}

inline void store_number(NcclDataType type, double value, void* place) {
  const auto write = [place](auto number) { std::memcpy(place, &number, sizeof(number)); };
  switch (type) {
    case NcclDataType::kFloat16:
      return write(to_float16(static_cast<float>(value)));
    case NcclDataType::kBfloat16:
      return write(to_bfloat16(static_cast<float>(value)));
    case NcclDataType::kFloat32:
      return write(static_cast<float>(value));
    default:
      return write(value);
  }
}

// One array of floating-point numbers per rank, reduced to `count` elements.
inline std::vector<std::byte> reduce_plainly(NcclDataType type, NcclRedOp op,
                                             const std::vector<const std::byte*>& arrays, std::size_t count) {
  const std::size_t element = size_of(type);
  std::vector<std::byte> result(count * element);
  for (std::size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (const std::byte* const array : arrays) {
      sum += load_number(type, array + i * element);
    }
    store_number(type, op == NcclRedOp::kAvg ? sum / static_cast<double>(arrays.size()) : sum,
                 result.data() + i * element);
  }
  return result;
}

}  // namespace accelerate_cpp::comm::testing
