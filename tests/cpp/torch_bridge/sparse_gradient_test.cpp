#include "torch_bridge/sparse_gradient.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::soon;

template <class Body>
void run_ranks(const Body& body) {
  comm::testing::run_threads(2, [&](comm::Store& store, int rank) {
    body(*comm::ShmCommunicator::connect(store, rank, 2, soon(), {}), rank);
  });
}

const at::Tensor& embedding() {
  static const at::Tensor tensor = at::full({4, 2}, 1, at::kFloat).set_requires_grad(true);
  return tensor;
}

// Two entries of one row, with the sum `value`.
at::Tensor gradient_of_row(std::int64_t row, float value) {
  return at::sparse_coo_tensor(at::tensor({row, row}, at::kLong).view({1, 2}), at::full({2, 2}, value / 2, at::kFloat),
                               {4, 2});
}

TEST(SparseGradients, AreAveragedRowByRow) {
  run_ranks([](comm::Communicator& communicator, int rank) {
    const at::Tensor own = gradient_of_row(rank + 1, 6);
    const at::Tensor average = average_sparse(communicator, embedding(), own, 2.0, soon());
    const at::Tensor expected = at::tensor({0.0f, 0.0f, 3.0f, 3.0f, 3.0f, 3.0f, 0.0f, 0.0f}).view({4, 2});
    EXPECT_TRUE(at::equal(average.to_dense(), expected));
    EXPECT_TRUE(average.is_coalesced());
    EXPECT_TRUE(at::equal(own.to_dense(), gradient_of_row(rank + 1, 6).to_dense())) << "what is given stays";
  });
}

TEST(SparseGradients, OfOneRankAreThereOnAll) {
  run_ranks([](comm::Communicator& communicator, int rank) {
    const at::Tensor own = rank == 0 ? gradient_of_row(3, 8) : at::Tensor();
    const at::Tensor average = average_sparse(communicator, embedding(), own, 4.0, soon());
    EXPECT_TRUE(at::equal(average.to_dense(), gradient_of_row(3, 2).to_dense()));
  });
}

TEST(SparseGradients, OfNoRankStayUndefined) {
  run_ranks([](comm::Communicator& communicator, int) {
    EXPECT_FALSE(average_sparse(communicator, embedding(), {}, 2.0, soon()).defined());
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
