#include "core/comm/call_signature.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

CallSignature some_call() {
  return {CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1, 10};
}

TEST(CallSignatures, DisagreeWhenAnythingDiffers) {
  EXPECT_TRUE(some_call().agrees_with(some_call(), false));
  const std::vector<std::function<void(CallSignature&)>> changes = {
      [](CallSignature& call) { call.kind = CallKind::kGather; },
      [](CallSignature& call) { call.dtype = DType::kInt32; },
      [](CallSignature& call) { call.op = ReduceOp::kMax; },
      [](CallSignature& call) { call.root = 0; },
      [](CallSignature& call) { call.count = 11; },
      [](CallSignature& call) { call.round = 1; },
      [](CallSignature& call) { call.shape = {10}; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    CallSignature changed = some_call();
    changes[i](changed);
    EXPECT_FALSE(changed.agrees_with(some_call(), false)) << "change " << i;
    EXPECT_FALSE(some_call().agrees_with(changed, false)) << "change " << i;
  }
}

TEST(CallSignatures, AgreeOnAnyCountWhereOperandsMayDifferInSize) {
  CallSignature more = some_call();
  more.count = 11;
  EXPECT_TRUE(more.agrees_with(some_call(), true));
  more.dtype = DType::kInt8;
  EXPECT_FALSE(more.agrees_with(some_call(), true));
}

TEST(CallSignatures, AreDescribedByWhatTellsThemApart) {
  CallSignature all_reduce{CallKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, -1, 1000};
  EXPECT_EQ(all_reduce.describe(), "all_reduce(sum) of 1000 float32");
  all_reduce.op = ReduceOp::kProduct;
  EXPECT_EQ(all_reduce.describe(), "all_reduce(product) of 1000 float32");
  EXPECT_EQ(some_call().describe(), "broadcast of 10 float32, root 1");
  for (const CallKind kind : {CallKind::kBarrier, CallKind::kSplit, CallKind::kMeeting, CallKind::kWithdrawal}) {
    EXPECT_EQ(CallSignature{kind}.describe(), name(kind));
  }
  CallSignature gradients{CallKind::kGradients, DType::kUInt8, ReduceOp::kAvg, -1, 4, (std::uint64_t{3} << 32) + 7};
  EXPECT_EQ(gradients.describe(), "gradient averaging of 4 buckets (round 7)");
  gradients.op = ReduceOp::kPreMulSum;
  EXPECT_EQ(gradients.describe(), "weighted gradient averaging of 4 buckets (round 7)");
}

TEST(CallSignatures, AreDescribedByTheirShapeWhenItIsKnown) {
  CallSignature call = some_call();
  call.shape = {5, 2};
  EXPECT_EQ(call.describe(), "broadcast of [5, 2] float32, root 1");
  call.shape = Shape(nullptr, 0);
  EXPECT_EQ(call.describe(), "broadcast of [] float32, root 1");
}

TEST(CallSignatures, OfEveryKindHaveTheirOwnName) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(CallKind::kWithdrawal); ++kind) {
    names.insert(name(static_cast<CallKind>(kind)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(CallKind::kWithdrawal) + 1);
  EXPECT_EQ(names.count("unknown operation"), 0u);
}

}  // namespace
}  // namespace accelerate_cpp::comm
