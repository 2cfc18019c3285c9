#include "torch_bridge/tensor_list.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

std::vector<std::int64_t> equal_sizes(const char* operation, std::int64_t rows, int num_ranks) {
  if (rows % num_ranks != 0) {
    throw InvalidArgument(std::string(operation) + ": a tensor whose first dimension has size " + std::to_string(rows) +
                          " cannot be divided evenly among " + std::to_string(num_ranks) + " ranks; pass split sizes");
  }
  return std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks), rows / num_ranks);
}

void check_sizes(const char* operation, const std::vector<std::int64_t>& sizes, std::int64_t rows, int num_ranks) {
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 0; });
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (sizes.size() != static_cast<std::size_t>(num_ranks) || negative || total != rows) {
    throw InvalidArgument(std::string(operation) + ": expected " + std::to_string(num_ranks) +
                          " split sizes, none of them negative, that add up to the size of the first dimension, " +
                          std::to_string(rows) + "; found " + std::to_string(sizes.size()) + " that add up to " +
                          std::to_string(total));
  }
}

}  // namespace

TensorList::TensorList(const std::vector<at::Tensor>& tensors, Use use) {
  parts_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    parts_.emplace_back(tensor, use);
  }
}

std::vector<ConstMemoryView> TensorList::load() {
  std::vector<ConstMemoryView> views;
  views.reserve(parts_.size());
  for (Contiguous& part : parts_) {
    views.emplace_back(part.load());
  }
  return views;
}

std::vector<MemoryView> TensorList::reserve() {
  std::vector<MemoryView> views;
  views.reserve(parts_.size());
  for (Contiguous& part : parts_) {
    views.push_back(part.reserve());
  }
  return views;
}

void TensorList::store() const {
  for (const Contiguous& part : parts_) {
    part.store();
  }
}

bool TensorList::all_have(std::size_t count) const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const Contiguous& part) { return part.count() == count; });
}

Rows::Rows(const char* operation, const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int num_ranks)
    : whole_(tensor, Use::kMove) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::vector<std::int64_t> all = sizes.empty() ? equal_sizes(operation, rows, num_ranks) : sizes;
  check_sizes(operation, all, rows, num_ranks);
  const std::size_t row_count = rows == 0 ? 0 : whole_.count() / static_cast<std::size_t>(rows);
  counts_.reserve(all.size());
  for (const std::int64_t size : all) {
    counts_.push_back(static_cast<std::size_t>(size) * row_count);
  }
}

std::vector<MemoryView> Rows::cut(const MemoryView& memory) const {
  std::vector<MemoryView> views;
  views.reserve(counts_.size());
  std::byte* begin = memory.bytes();
  for (const std::size_t count : counts_) {
    views.push_back({begin, count, memory.dtype});
    begin += views.back().size_bytes();
  }
  return views;
}

WholeAndPart::WholeAndPart(const char* operation, const at::Tensor& whole_, const at::Tensor& part_, int num_ranks,
                           Use use)
    : whole(whole_, use), part(part_, use) {
  if (whole_.scalar_type() != part_.scalar_type() ||
      whole.count() != part.count() * static_cast<std::size_t>(num_ranks)) {
    throw InvalidArgument(std::string(operation) + ": the tensor of all ranks must have the dtype and " +
                          std::to_string(num_ranks) + " times the elements of that of one rank; found " +
                          std::to_string(whole_.numel()) + " of " + c10::toString(whole_.scalar_type()) + " and " +
                          std::to_string(part_.numel()) + " of " + c10::toString(part_.scalar_type()));
  }
}

}  // namespace accelerate_cpp
