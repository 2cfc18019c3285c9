// Operands of collectives whose elements are known functions of (rank, index).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/half.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::comm::testing {

inline const std::vector<DType> kAllDTypes = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                                              DType::kInt8,    DType::kInt16,   DType::kInt32,   DType::kInt64,
                                              DType::kUInt8,   DType::kBool};

// Small integers: exact in every dtype, whatever the order of summation.
inline double operand(int rank, std::size_t index, DType dtype) {
  const auto value = static_cast<double>((index * 7 + static_cast<std::size_t>(rank) * 3) % 5);
  return dtype == DType::kBool ? static_cast<double>(value > 2) : value;
}

inline void put(MemoryView view, std::size_t index, double value) {
  std::byte* const place = view.bytes() + index * element_size(view.dtype);
  const auto write = [place](auto element) { std::memcpy(place, &element, sizeof(element)); };
  switch (view.dtype) {
    case DType::kFloat32:
      return write(static_cast<float>(value));
    case DType::kFloat64:
      return write(value);
    case DType::kFloat16:
      return write(to_float16(static_cast<float>(value)));
    case DType::kBFloat16:
      return write(to_bfloat16(static_cast<float>(value)));
    case DType::kInt8:
      return write(static_cast<std::int8_t>(value));
    case DType::kInt16:
      return write(static_cast<std::int16_t>(value));
    case DType::kInt32:
      return write(static_cast<std::int32_t>(value));
    case DType::kInt64:
      return write(static_cast<std::int64_t>(value));
    case DType::kUInt8:
    case DType::kBool:
      return write(static_cast<std::uint8_t>(value));
  }
}

template <class T>
T read_as(const std::byte* place) {
  T element;
  std::memcpy(&element, place, sizeof(element));
  return element;
}

inline double get(ConstMemoryView view, std::size_t index) {
  const std::byte* const place = view.bytes() + index * element_size(view.dtype);
  switch (view.dtype) {
    case DType::kFloat32:
      return read_as<float>(place);
    case DType::kFloat64:
      return read_as<double>(place);
    case DType::kFloat16:
      return to_float(read_as<Float16>(place));
    case DType::kBFloat16:
      return to_float(read_as<BFloat16>(place));
    case DType::kInt8:
      return read_as<std::int8_t>(place);
    case DType::kInt16:
      return read_as<std::int16_t>(place);
    case DType::kInt32:
      return read_as<std::int32_t>(place);
    case DType::kInt64:
      return static_cast<double>(read_as<std::int64_t>(place));
    case DType::kUInt8:
    case DType::kBool:
      return read_as<std::uint8_t>(place);
  }
  return 0;
}

// Memory for an operand, on the heap or from the communicator.
class Operand {
 public:
  Operand(std::size_t count, DType dtype) : heap_(count * element_size(dtype) + 1), view_{heap_.data(), count, dtype} {}
  Operand(Communicator& communicator, std::size_t count, DType dtype)
      : buffer_(communicator.allocate(count * element_size(dtype) + 1)), view_{buffer_->data(), count, dtype} {}

  MemoryView view() const { return view_; }

  Operand& fill(int rank, std::size_t first = 0) {
    for (std::size_t i = 0; i < view_.count; ++i) {
      put(view_, i, operand(rank, first + i, view_.dtype));
    }
    return *this;
  }

 private:
  std::vector<std::byte> heap_;
  std::shared_ptr<Buffer> buffer_;
  MemoryView view_;
};

// Counts the elements of `view` that differ from `expected(index)`; averages may be rounded.
template <class Expected>
std::size_t differences(ConstMemoryView view, double tolerance, const Expected& expected) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < view.count; ++i) {
    const double want = expected(i);
    const double error = std::abs(get(view, i) - want);
    count += error <= tolerance * std::abs(want) ? 0 : 1;
  }
  return count;
}

// Blocks of one tensor, one per rank.
class Row {
 public:
  Row(Communicator& communicator, const std::vector<std::size_t>& counts, DType dtype, bool in_arena)
      : whole_(in_arena ? Operand(communicator, total(counts), dtype) : Operand(total(counts), dtype)) {
    std::size_t begin = 0;
    for (const std::size_t count : counts) {
      parts_.push_back({whole_.view().bytes() + begin * element_size(dtype), count, dtype});
      begin += count;
    }
  }
  const std::vector<MemoryView>& parts() const { return parts_; }
  std::vector<ConstMemoryView> const_parts() const { return {parts_.begin(), parts_.end()}; }
  MemoryView part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  void clear() { std::memset(whole_.view().data, 0, whole_.view().size_bytes()); }
  // Element i of part r becomes value(r, i).
  template <class Value>
  Row& fill(const Value& value) {
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      for (std::size_t i = 0; i < parts_[r].count; ++i) {
        put(parts_[r], i, value(static_cast<int>(r), i));
      }
    }
    return *this;
  }
  template <class Value>
  std::size_t differences_from(const Value& value) const {
    std::size_t count = 0;
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      count += differences(parts_[r], 0, [&](std::size_t i) { return value(static_cast<int>(r), i); });
    }
    return count;
  }

 private:
  static std::size_t total(const std::vector<std::size_t>& counts) {
    std::size_t sum = 0;
    for (const std::size_t count : counts) {
      sum += count;
    }
    return sum;
  }

  Operand whole_;
  std::vector<MemoryView> parts_;
};

}  // namespace accelerate_cpp::comm::testing
