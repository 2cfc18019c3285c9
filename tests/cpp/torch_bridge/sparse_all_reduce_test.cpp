#include "torch_bridge/sparse_all_reduce.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

void run_ranks(int size, const std::function<void(Communicator& communicator, int rank)>& body) {
  testing::run_threads(size, [&](Store& store, int rank) {
    body(*ShmCommunicator::connect(store, rank, size, testing::soon(), {}), rank);
  });
}

Call call(const at::Tensor& tensor) {
  return {testing::soon(), Shape(tensor.sizes().data(), tensor.sizes().size())};
}

// A matrix with `rank` rows that are not zero, of which each rank has some in common with the others.
at::Tensor rows_of(int rank) {
  at::Tensor dense = at::zeros({6, 3}, at::kDouble);
  for (int row = 0; row < rank; ++row) {
    dense[2 * row % 5].fill_(rank + row);
  }
  return dense;
}

TEST(SparseAllReduce, SumsTensorsThatStoreDifferentElements) {
  for (const std::int64_t sparse_dims : {1, 2}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      run_ranks(3, [&](Communicator& communicator, int rank) {
        const at::Tensor tensor = rows_of(rank).to_sparse(sparse_dims);
        sparse_all_reduce(communicator, tensor, op, call(tensor));
        const at::Tensor sum = rows_of(0) + rows_of(1) + rows_of(2);
        EXPECT_TRUE(tensor.is_coalesced());
        EXPECT_TRUE(at::equal(tensor.to_dense(), op == ReduceOp::kAvg ? sum / 3 : sum));
      });
    }
  }
}

TEST(SparseAllReduce, AddsElementsThatOneTensorStoresTwice) {
  run_ranks(2, [](Communicator& communicator, int rank) {
    const at::Tensor once = rows_of(rank + 1).to_sparse();
    const at::Tensor twice = at::_sparse_coo_tensor_unsafe(at::cat({once._indices(), once._indices()}, 1),
                                                           at::cat({once._values(), once._values()}), once.sizes());
    sparse_all_reduce(communicator, twice, ReduceOp::kSum, call(twice));
    EXPECT_TRUE(at::equal(twice.to_dense(), 2 * (rows_of(1) + rows_of(2))));
  });
}

TEST(SparseAllReduce, KeepsTensorsThatStoreNothing) {
  run_ranks(2, [](Communicator& communicator, int) {
    const at::Tensor tensor = at::zeros({4, 2}, at::kFloat).to_sparse();
    sparse_all_reduce(communicator, tensor, ReduceOp::kSum, call(tensor));
    EXPECT_EQ(tensor._nnz(), 0);
    EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{4, 2}));
  });
}

TEST(SparseAllReduce, IsBitwiseEqualOnAllRanks) {
  std::mutex mutex;
  std::vector<at::Tensor> results;
  run_ranks(3, [&](Communicator& communicator, int) {
    const at::Tensor tensor = at::randn({50, 4}, at::kFloat).to_sparse(1);
    sparse_all_reduce(communicator, tensor, ReduceOp::kSum, call(tensor));
    const std::lock_guard lock(mutex);
    results.push_back(tensor.to_dense());
  });
  EXPECT_TRUE(at::equal(results[0], results[1]));
  EXPECT_TRUE(at::equal(results[0], results[2]));
}

TEST(SparseAllReduce, RaisesOnEveryRankWhenShapesOrSparseDimensionsDiffer) {
  run_ranks(2, [](Communicator& communicator, int rank) {
    const at::Tensor tensor = at::zeros({4, rank + 1}, at::kFloat).to_sparse();
    EXPECT_THROW(sparse_all_reduce(communicator, tensor, ReduceOp::kSum, call(tensor)), MismatchedCollective);
    const at::Tensor other = at::zeros({4, 3}, at::kFloat).to_sparse(rank + 1);
    EXPECT_THAT(
        message_of<MismatchedCollective>([&] { sparse_all_reduce(communicator, other, ReduceOp::kSum, call(other)); }),
        HasSubstr("sparse dimensions on rank"));
  });
}

TEST(SparseAllReduce, RefusesOtherReductionsAndLayouts) {
  SoloCommunicator communicator;
  const at::Tensor tensor = at::zeros({4, 2}, at::kLong).to_sparse();
  const auto reduce = [&](const at::Tensor& operand, ReduceOp op) {
    return message_of<InvalidArgument>([&] { sparse_all_reduce(communicator, operand, op, call(operand)); });
  };
  EXPECT_THAT(reduce(tensor, ReduceOp::kMax), HasSubstr("found max. Call .to_dense() for others"));
  EXPECT_THAT(reduce(tensor, ReduceOp::kAvg), HasSubstr("found avg"));
  EXPECT_THAT(reduce(tensor.to_dense().to_sparse_csr(), ReduceOp::kSum), HasSubstr("call .to_sparse_coo() first"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
