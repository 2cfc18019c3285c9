// The element types that collectives carry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace accelerate_cpp {

enum class DType : std::uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
};

inline constexpr int kNumDTypes = 10;

// Bytes of one element.
std::size_t element_size(DType dtype);

// The name users know, as torch prints it without its prefix: "float32", "bfloat16", ...
const char* name(DType dtype);

bool is_floating(DType dtype);

}  // namespace accelerate_cpp
