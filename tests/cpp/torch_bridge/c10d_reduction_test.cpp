#include "torch_bridge/c10d_reduction.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "torch_bridge/pre_mul_sum.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

TEST(C10dReduction, HasEveryReductionOfC10d) {
  const std::vector<std::pair<::c10d::ReduceOp::RedOpType, ReduceOp>> pairs = {
      {::c10d::ReduceOp::SUM, ReduceOp::kSum},         {::c10d::ReduceOp::AVG, ReduceOp::kAvg},
      {::c10d::ReduceOp::PRODUCT, ReduceOp::kProduct}, {::c10d::ReduceOp::MIN, ReduceOp::kMin},
      {::c10d::ReduceOp::MAX, ReduceOp::kMax},         {::c10d::ReduceOp::BAND, ReduceOp::kBitAnd},
      {::c10d::ReduceOp::BOR, ReduceOp::kBitOr},       {::c10d::ReduceOp::BXOR, ReduceOp::kBitXor}};
  for (const auto& [theirs, ours] : pairs) {
    EXPECT_EQ(reduction_of(theirs, false).op, ours);
    EXPECT_EQ(reduction_of(theirs, false).factor, 1.0);
  }
}

TEST(C10dReduction, ReadsFactorsFromNumbersAndTensors) {
  const Reduction number = reduction_of(testing::pre_mul_sum(2.5), false);
  EXPECT_EQ(number.op, ReduceOp::kPreMulSum);
  EXPECT_EQ(number.factor, 2.5);
  EXPECT_EQ(reduction_of(testing::pre_mul_sum(at::full({1}, 3, at::kInt)), true).factor, 3.0);
}

TEST(C10dReduction, RefusesAFactorThatIsNotThere) {
  ::c10d::ReduceOp op;
  op.op_ = ::c10d::ReduceOp::PREMUL_SUM;
  EXPECT_THAT(message_of<InvalidArgument>([&] { reduction_of(op, false); }), HasSubstr("needs a factor"));
}

TEST(C10dReduction, RefusesWhatHasNoMeaning) {
  EXPECT_THAT(message_of<InvalidArgument>([] { reduction_of(::c10d::ReduceOp::UNUSED, false); }),
              HasSubstr("expected SUM, AVG, MIN"));
  EXPECT_THAT(message_of<InvalidArgument>([] { reduction_of(::c10d::ReduceOp::MAX, true); }),
              HasSubstr("complex tensors can be combined with SUM, AVG and PREMUL_SUM only"));
  EXPECT_EQ(reduction_of(::c10d::ReduceOp::AVG, true).op, ReduceOp::kAvg);
}

}  // namespace
}  // namespace accelerate_cpp::comm
