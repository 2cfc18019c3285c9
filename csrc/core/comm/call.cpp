#include "core/comm/call.h"

#include <algorithm>

namespace accelerate_cpp::comm {

Shape::Shape(const std::int64_t* first, std::size_t count) {
  if (count <= kMaxDimensions) {
    dimensions = static_cast<std::int32_t>(count);
    std::copy_n(first, count, sizes);
  }
}

bool Shape::operator==(const Shape& other) const {
  return dimensions == other.dimensions && (dimensions <= 0 || std::equal(sizes, sizes + dimensions, other.sizes));
}

std::string Shape::to_string() const {
  if (!known()) {
    return "";
  }
  std::string text = "[";
  for (int d = 0; d < std::min(dimensions, kMaxDimensions); ++d) {  // a peer may share a damaged one
    text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  }
  return text + "]";
}

CallSite::CallSite(std::string_view text) {
  const std::size_t tab = text.find('\t');
  called = tab == std::string_view::npos ? std::string_view() : text.substr(0, tab);
  place = tab == std::string_view::npos ? text : text.substr(tab + 1);
}

}  // namespace accelerate_cpp::comm
