// Typed, contiguous memory owned by someone else. A view never allocates, frees or copies.
#pragma once

#include <cstddef>

#include "core/base/dtype.h"

namespace accelerate_cpp {

struct MemoryView {
  void* data = nullptr;
  std::size_t count = 0;  // elements
  DType dtype = DType::kFloat32;

  std::size_t size_bytes() const { return count * element_size(dtype); }
  std::byte* bytes() const { return static_cast<std::byte*>(data); }
};

struct ConstMemoryView {
  const void* data = nullptr;
  std::size_t count = 0;  // elements
  DType dtype = DType::kFloat32;

  ConstMemoryView() = default;
  ConstMemoryView(const void* data_, std::size_t count_, DType dtype_) : data(data_), count(count_), dtype(dtype_) {}
  ConstMemoryView(const MemoryView& view)  // NOLINT(google-explicit-constructor): reading is always allowed
      : data(view.data), count(view.count), dtype(view.dtype) {}

  std::size_t size_bytes() const { return count * element_size(dtype); }
  const std::byte* bytes() const { return static_cast<const std::byte*>(data); }
};

}  // namespace accelerate_cpp
