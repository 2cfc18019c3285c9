#include "torch_bridge/sparse_all_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::comm {
namespace {

void check(const at::Tensor& tensor, const Reduction& reduction) {
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu()) {
    throw InvalidArgument(
        "all_reduce: expected a sparse CPU tensor in coordinate format (torch.sparse_coo), found one "
        "on " +
        tensor.device().str() + " in another format; call .to_sparse_coo() first");
  }
  if (reduction.op != ReduceOp::kSum && !(reduction.op == ReduceOp::kAvg && tensor.is_floating_point())) {
    throw InvalidArgument(std::string("all_reduce: sparse tensors can be combined with SUM, and with AVG when they are "
                                      "floating-point; found ") +
                          name(reduction.op) + ". Call .to_dense() for others");
  }
}

// Gathers tensors that agree in all sizes but the first, which is `rows[r]` on rank r, into one, in rank order.
at::Tensor gather_rows(Communicator& communicator, const at::Tensor& own, const std::vector<std::int64_t>& rows,
                       const Call& call) {
  std::int64_t total = 0;
  for (const std::int64_t count : rows) {
    total += count;
  }
  std::vector<std::int64_t> sizes = own.sizes().vec();
  const std::int64_t own_rows = sizes.at(0);
  sizes[0] = total;
  const at::Tensor whole = at::empty(sizes, own.options());
  const MemoryView memory = view_of(whole);
  const MemoryView input = view_of(own);
  const std::size_t row = own_rows == 0 ? (total == 0 ? 0 : memory.count / static_cast<std::size_t>(total))
                                        : input.count / static_cast<std::size_t>(own_rows);
  std::vector<MemoryView> outputs;
  std::size_t begin = 0;
  for (const std::int64_t count : rows) {
    const std::size_t length = static_cast<std::size_t>(count) * row;
    outputs.push_back({memory.bytes() + begin * element_size(memory.dtype), length, memory.dtype});
    begin += length;
  }
  communicator.all_gather(input, outputs, Call(call.deadline, {}, call.location));
  return whole;
}

std::vector<std::int64_t> gather_counts(Communicator& communicator, std::int64_t stored, std::int64_t sparse_dim,
                                        const Call& call) {
  const std::int64_t own[2] = {stored, sparse_dim};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(communicator.size()));
  const MemoryView memory{all.data(), all.size(), DType::kInt64};
  communicator.all_gather({own, 2, DType::kInt64}, split_view(memory, communicator.size()), call);
  std::vector<std::int64_t> counts;
  for (std::size_t r = 0; r < all.size() / 2; ++r) {
    counts.push_back(all[2 * r]);
    if (all[2 * r + 1] != sparse_dim) {
      throw MismatchedCollective("all_reduce: the sparse tensor has " + std::to_string(sparse_dim) +
                                 " sparse dimensions on " + communicator.name_of(communicator.rank()) + " but " +
                                 std::to_string(all[2 * r + 1]) + " on " + communicator.name_of(static_cast<int>(r)));
    }
  }
  return counts;
}

}  // namespace

void sparse_all_reduce(Communicator& communicator, const at::Tensor& tensor, const Reduction& reduction,
                       const Call& call) {
  check(tensor, reduction);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor own = tensor.coalesce();
  // The sizes of the dense whole travel with the counts, to be compared.
  const std::vector<std::int64_t> counts = gather_counts(communicator, own._nnz(), own.sparse_dim(), call);
  const at::Tensor indices = gather_rows(communicator, own._indices().t().contiguous(), counts, call);
  at::Tensor values = gather_rows(communicator, own._values().contiguous(), counts, call);
  if (reduction.op == ReduceOp::kAvg) {
    values.div_(communicator.size());
  }
  tensor.copy_(at::_sparse_coo_tensor_unsafe(indices.t(), values, tensor.sizes()).coalesce());
}

}  // namespace accelerate_cpp::comm
