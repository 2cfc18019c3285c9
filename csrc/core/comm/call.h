// What accompanies one call of a communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/base/deadline.h"

namespace accelerate_cpp::comm {

// The sizes of a tensor, if they are known. An unknown shape equals only another unknown one. Trivially copyable, so
// that it can lie in shared memory.
struct Shape {
  static constexpr int kMaxDimensions = 8;

  std::int32_t dimensions = -1;  // -1: unknown (also for tensors of more than kMaxDimensions dimensions)
  std::int64_t sizes[kMaxDimensions] = {};

  Shape() = default;
  Shape(const std::int64_t* first, std::size_t count);
  Shape(std::initializer_list<std::int64_t> list) : Shape(list.begin(), list.size()) {}

  bool known() const { return dimensions >= 0; }
  bool operator==(const Shape& other) const;
  // "[2, 3]", "[]" for a scalar, "" when unknown.
  std::string to_string() const;
};

struct Call {
  Call(Deadline deadline_, Shape shape_ = {}, std::string_view location_ = {})  // NOLINT(google-explicit-constructor)
      : deadline(deadline_), shape(shape_), location(location_) {}

  Deadline deadline;
  Shape shape;                // of this rank's operand, compared between ranks where operands correspond
  std::string_view location;  // "train.py:88"; empty: WaitHooks::call_site is asked when it is needed
};

}  // namespace accelerate_cpp::comm
