#include "core/base/dtype.h"

#include <array>

namespace accelerate_cpp {
namespace {

struct Row {
  const char* name;
  std::size_t size;
};

constexpr std::array<Row, kNumDTypes> kRows = {{{"float32", 4},
                                                {"float64", 8},
                                                {"float16", 2},
                                                {"bfloat16", 2},
                                                {"int8", 1},
                                                {"int16", 2},
                                                {"int32", 4},
                                                {"int64", 8},
                                                {"uint8", 1},
                                                {"bool", 1}}};

}  // namespace

std::size_t element_size(DType dtype) {
  return kRows[static_cast<std::size_t>(dtype)].size;
}

const char* name(DType dtype) {
  const auto row = static_cast<std::size_t>(dtype);
  return row < kRows.size() ? kRows[row].name : "unknown dtype";  // of a peer whose memory is damaged
}

bool is_floating(DType dtype) {
  return dtype <= DType::kBFloat16;
}

}  // namespace accelerate_cpp
