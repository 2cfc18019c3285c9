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
  std::string_view location;  // the text of a CallSite; empty: WaitHooks::call_site is asked when it is needed
};

// Where the program called an operation, as one text: "train.py:88". If it called something else, which became the
// operation, a tab and that come before: "gather of a float32 tensor of shape (2,)\ttrain.py:88".
struct CallSite {
  explicit CallSite(std::string_view text);

  std::string_view called;  // empty: the operation itself
  std::string_view place;   // empty: unknown

  // The name for messages: what the program called, else `operation`.
  std::string name(const std::string& operation) const { return called.empty() ? operation : std::string(called); }
  // " at train.py:88", or nothing.
  std::string suffix() const { return place.empty() ? "" : " at " + std::string(place); }
};

}  // namespace accelerate_cpp::comm
