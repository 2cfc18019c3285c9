#include "core/comm/options.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace accelerate_cpp::comm {
namespace {

TEST(Reductions, HaveTheNamesThatTorchPrints) {
  EXPECT_STREQ(name(ReduceOp::kSum), "sum");
  EXPECT_STREQ(name(ReduceOp::kAvg), "avg");
  EXPECT_STREQ(name(ReduceOp::kMin), "min");
  EXPECT_STREQ(name(ReduceOp::kMax), "max");
  EXPECT_STREQ(name(ReduceOp::kProduct), "product");
  EXPECT_STREQ(name(ReduceOp::kPreMulSum), "premul_sum");
  EXPECT_STREQ(name(ReduceOp::kBitAnd), "band");
  EXPECT_STREQ(name(ReduceOp::kBitOr), "bor");
  EXPECT_STREQ(name(ReduceOp::kBitXor), "bxor");
}

TEST(Reductions, OfAnotherProgramAreNotTakenForOneOfOurs) {
  std::set<std::string> names;
  for (int op = 0; op <= static_cast<int>(ReduceOp::kBitXor) + 1; ++op) {
    names.insert(name(static_cast<ReduceOp>(op)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(ReduceOp::kBitXor) + 2) << "every name is used once";
}

TEST(Reductions, MultiplyByOneUnlessTold) {
  const Reduction plain = ReduceOp::kMax;
  EXPECT_EQ(plain.op, ReduceOp::kMax);
  EXPECT_EQ(plain.factor, 1.0);
  const Reduction scaled{ReduceOp::kPreMulSum, 0.25};
  EXPECT_EQ(scaled.op, ReduceOp::kPreMulSum);
  EXPECT_EQ(scaled.factor, 0.25);
}

TEST(WaitHooks, OfAPartOfAGroupCallItsRanksAsThoseOfTheGroupDo) {
  WaitHooks hooks;
  EXPECT_EQ(hooks.name_of(1), "rank 1");
  const WaitHooks part = hooks.among({3, 1, 2});
  EXPECT_EQ(part.name_of(0), "rank 3");
  EXPECT_EQ(part.among({2, 0}).name_of(0), "rank 2");
  EXPECT_EQ(part.among({2, 0}).number_of(1), 3);
}

TEST(WaitHooks, CanAllBeCalledWhenNoneIsGiven) {
  const WaitHooks hooks;
  EXPECT_NO_THROW(hooks.probe());
  EXPECT_EQ(hooks.call_site(), "");
  EXPECT_NO_THROW(hooks.warn("rank 0 waits"));
  EXPECT_GT(hooks.warn_after.count(), 0);
}

}  // namespace
}  // namespace accelerate_cpp::comm
