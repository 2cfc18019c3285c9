// Several tensors, or the parts of one, as the operands of one collective. All check their arguments when they are
// made, and throw InvalidArgument that begins with `operation`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/base/view_parts.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp {

class TensorList {
 public:
  TensorList(const std::vector<at::Tensor>& tensors, Use use);

  // As the functions of Contiguous, for each tensor.
  std::vector<ConstMemoryView> load();
  std::vector<MemoryView> reserve();
  void store() const;

  bool all_have(std::size_t count) const;

 private:
  std::vector<Contiguous> parts_;
};

// A tensor cut along its first dimension into one part per rank: of `sizes`, or of equal size when there are none.
class Rows {
 public:
  Rows(const char* operation, const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int num_ranks);

  std::vector<ConstMemoryView> load() { return const_views(cut(whole_.load())); }
  std::vector<MemoryView> reserve() { return cut(whole_.reserve()); }
  void store() const { whole_.store(); }

 private:
  std::vector<MemoryView> cut(const MemoryView& memory) const;

  Contiguous whole_;
  std::vector<std::size_t> counts_;
};

// One tensor with the parts of all ranks, one after the other, and the part of this rank.
struct WholeAndPart {
  WholeAndPart(const char* operation, const at::Tensor& whole_, const at::Tensor& part_, int num_ranks, Use use);

  Contiguous whole;
  Contiguous part;
};

}  // namespace accelerate_cpp
