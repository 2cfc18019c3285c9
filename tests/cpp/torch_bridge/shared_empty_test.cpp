#include "torch_bridge/shared_empty.h"

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {
namespace {

TEST(SharedEmpty, HasTheShapeAndDtypeAskedFor) {
  SoloCommunicator communicator;
  const at::Tensor tensor = shared_empty(communicator, {2, 3}, at::kHalf);
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST(SharedEmpty, MayHaveNoElements) {
  SoloCommunicator communicator;
  EXPECT_EQ(shared_empty(communicator, {0, std::int64_t{1} << 62}, at::kFloat).numel(), 0);
  EXPECT_EQ(shared_empty(communicator, {}, at::kFloat).numel(), 1) << "no dimension at all is one element";
}

TEST(SharedEmpty, RefusesShapesThatNoTensorHas) {
  SoloCommunicator communicator;
  EXPECT_THROW(shared_empty(communicator, {2, -3}, at::kFloat), InvalidArgument);
  EXPECT_THROW(shared_empty(communicator, {std::int64_t{1} << 40, std::int64_t{1} << 40}, at::kFloat), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::comm
