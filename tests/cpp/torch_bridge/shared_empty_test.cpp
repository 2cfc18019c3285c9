#include "torch_bridge/shared_empty.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/shared_buffer.h"

namespace accelerate_cpp::comm {
namespace {

TEST(SharedEmpty, HasTheShapeAndDtypeAskedFor) {
  const at::Tensor tensor = shared_empty({2, 3}, at::kHalf);
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST(SharedEmpty, MayHaveNoElements) {
  EXPECT_EQ(shared_empty({0, std::int64_t{1} << 62}, at::kFloat).numel(), 0);
  EXPECT_EQ(shared_empty({}, at::kFloat).numel(), 1) << "no dimension at all is one element";
}

TEST(SharedEmpty, RefusesShapesThatNoTensorHas) {
  EXPECT_THROW(shared_empty({2, -3}, at::kFloat), InvalidArgument);
  EXPECT_THROW(shared_empty({std::int64_t{1} << 40, std::int64_t{1} << 40}, at::kFloat), InvalidArgument);
}

TEST(SharedEmpty, IsRecognisedInEveryViewOfIt) {
  const at::Tensor tensor = shared_empty({4, 5}, at::kFloat);
  const bool can_be_shared = is_shared(tensor.data_ptr(), tensor.nbytes());
  EXPECT_EQ(is_shared_tensor(tensor), can_be_shared);
  EXPECT_EQ(is_shared_tensor(tensor.t().narrow(0, 1, 2)), can_be_shared);
  EXPECT_FALSE(is_shared_tensor(tensor.clone()));
  EXPECT_FALSE(is_shared_tensor(at::empty({4}, at::TensorOptions().device(at::kMeta))));
  EXPECT_FALSE(is_shared_tensor(tensor.to_sparse()));
}

TEST(SharedEmpty, LivesAsLongAsAnyViewOfIt) {
  at::Tensor tail;
  {
    const at::Tensor tensor = shared_empty({1 << 20}, at::kFloat);
    tensor.fill_(3);
    tail = tensor.narrow(0, (1 << 20) - 2, 2);
  }
  EXPECT_EQ(tail.sum().item<float>(), 6);
}

}  // namespace
}  // namespace accelerate_cpp::comm
