// Alignment of sizes and offsets.
#pragma once

#include <cstddef>

namespace accelerate_cpp {

// The smallest multiple of `multiple` that is not below `value`.
constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace accelerate_cpp
