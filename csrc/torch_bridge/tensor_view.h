// at::Tensor as the core's MemoryView.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/base/memory_view.h"

namespace accelerate_cpp {

// The dtype in the core's terms. Throws InvalidArgument for one that no collective carries.
DType dtype_of(const at::Tensor& tensor);

// The memory of a contiguous CPU tensor. Throws InvalidArgument for any other; the tensor must outlive the view.
MemoryView view_of(const at::Tensor& tensor);

// `count` equal parts of a contiguous tensor, in order.
std::vector<MemoryView> split_view(const at::Tensor& tensor, int count);

// A contiguous stand-in for a tensor: the tensor itself, or a copy that write_back() copies home.
class Contiguous {
 public:
  explicit Contiguous(at::Tensor tensor);

  MemoryView view() const { return view_of(contiguous_); }
  void write_back() const;

 private:
  at::Tensor original_;
  at::Tensor contiguous_;
};

}  // namespace accelerate_cpp
