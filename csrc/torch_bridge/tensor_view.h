// at::Tensor as the core's MemoryView.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/base/memory_view.h"

namespace accelerate_cpp {

// The dtype in the core's terms. Throws InvalidArgument for one with which the core does not compute.
DType dtype_of(const at::Tensor& tensor);

// How the elements are used. Complex numbers are pairs of real ones in both cases. Elements that are only moved may
// have any dtype and travel as bytes if the core has no name for it.
enum class Use : std::uint8_t { kCompute, kMove };

// The memory of a contiguous CPU tensor. Throws InvalidArgument for any other; the tensor must outlive the view.
MemoryView view_of(const at::Tensor& tensor, Use use = Use::kCompute);

// The elements of a dense tensor on any device, in the core's terms: a complex number is two. Throws as dtype_of.
struct Elements {
  DType dtype;
  std::size_t count;
};
Elements elements_of(const at::Tensor& tensor);

// `count` equal parts, in order. Throws InvalidArgument when that leaves a rest.
std::vector<MemoryView> split_view(const MemoryView& whole, int count);

// A dense CPU tensor of any strides, and the contiguous memory in which a collective works on it: its own, or that of a
// stand-in. Throws InvalidArgument for other tensors. Works in any thread and under any autograd mode.
class Contiguous {
 public:
  explicit Contiguous(at::Tensor tensor, Use use = Use::kCompute);

  const at::Tensor& tensor() const { return tensor_; }
  DType dtype() const { return dtype_; }
  // Of the core's elements: 2 for a complex number.
  std::size_t count() const { return count_; }

  // Memory that holds the values that the tensor has now.
  MemoryView load();
  // Memory for results, whose values may be anything.
  MemoryView reserve();
  // Copies results back from the stand-in. Throws InvalidArgument where elements of the tensor share memory.
  void store() const;

 private:
  MemoryView view() const;
  bool needs_stand_in() const;

  at::Tensor tensor_;
  at::Tensor stand_in_;
  DType dtype_;
  std::size_t count_;
};

}  // namespace accelerate_cpp
