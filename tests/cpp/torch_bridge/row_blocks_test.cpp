#include "torch_bridge/row_blocks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

TEST(RowBlocks, GetEqualPartsOneAfterTheOther) {
  const at::Tensor bucket = at::full({3, 4}, -1.0);
  copy_into_blocks(at::arange(6.0).view({3, 2}), bucket, 1, 2, 3);
  const at::Tensor expected =
      at::tensor({-1.0, 0.0, 1.0, -1.0, -1.0, 2.0, 3.0, -1.0, -1.0, 4.0, 5.0, -1.0}).view({3, 4});
  EXPECT_TRUE(at::equal(bucket, expected.to(at::kFloat))) << bucket;
}

TEST(RowBlocks, OfTheLastRanksGetWhatIsLeft) {
  const at::Tensor bucket = at::full({4, 2}, -1.0);
  copy_into_blocks(at::arange(3.0), bucket, 0, 2, 4);
  const at::Tensor expected = at::tensor({0.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0, -1.0}).view({4, 2});
  EXPECT_TRUE(at::equal(bucket, expected.to(at::kFloat))) << bucket;
}

TEST(RowBlocks, TakeGradientsOfAnyStrides) {
  const at::Tensor bucket = at::zeros({2, 3});
  copy_into_blocks(at::arange(6.0).view({3, 2}).t(), bucket, 0, 3, 2);
  const at::Tensor expected = at::tensor({0.0, 2.0, 4.0, 1.0, 3.0, 5.0}).view({2, 3});
  EXPECT_TRUE(at::equal(bucket, expected.to(at::kFloat))) << bucket;
}

TEST(RowBlocks, RefuseWhatDoesNotFit) {
  const at::Tensor bucket = at::zeros({2, 3});
  EXPECT_THROW(copy_into_blocks(at::zeros({7}), bucket, 0, 3, 2), InvalidArgument);
  EXPECT_THROW(copy_into_blocks(at::zeros({4}), bucket, 2, 2, 2), InvalidArgument);
  EXPECT_THROW(copy_into_blocks(at::zeros({4}, at::kDouble), bucket, 0, 2, 2), InvalidArgument);
  EXPECT_THROW(copy_into_blocks(at::zeros({4}), bucket, 0, 2, 0), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::grad
