#include "core/comm/shm/control_block.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

Operation some_operation() {
  Operation operation{OperationKind::kBroadcast, DType::kFloat32, ReduceOp::kSum};
  operation.root = 1;
  operation.count = 10;
  return operation;
}

TEST(Operations, AgreeWithThemselves) {
  EXPECT_TRUE(some_operation().agrees_with(some_operation()));
}

TEST(Operations, DisagreeWhenAnythingDiffersThatAllRanksMustHaveEqual) {
  const std::vector<std::function<void(Operation&)>> changes = {
      [](Operation& operation) { operation.kind = OperationKind::kGather; },
      [](Operation& operation) { operation.dtype = DType::kInt32; },
      [](Operation& operation) { operation.reduce_op = ReduceOp::kMax; },
      [](Operation& operation) { operation.root = 0; },
      [](Operation& operation) { operation.count = 11; },
      [](Operation& operation) { operation.round = 1; },
      [](Operation& operation) { operation.shape = {10}; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Operation changed = some_operation();
    changes[i](changed);
    EXPECT_FALSE(changed.agrees_with(some_operation())) << "change " << i;
    EXPECT_FALSE(some_operation().agrees_with(changed)) << "change " << i;
  }
}

TEST(Operations, WhoseOperandsMayDifferInSizeAgreeOnAnyCount) {
  Operation some = some_operation();
  some.has_counts = true;
  Operation more = some;
  more.count = 11;
  EXPECT_TRUE(some.agrees_with(more));
  more.dtype = DType::kInt8;
  EXPECT_FALSE(some.agrees_with(more));
}

TEST(Operations, AgreeWhateverEachRankMultipliesWith) {
  Operation scaled = some_operation();
  scaled.factor = 0.5;
  EXPECT_TRUE(scaled.agrees_with(some_operation()));
}

TEST(Operations, AgreeWhereverTheirOperandsLie) {
  Operation elsewhere = some_operation();
  elsewhere.in_arena = true;
  elsewhere.segment = 3;
  elsewhere.offset_bytes = 640;
  EXPECT_TRUE(elsewhere.agrees_with(some_operation()));
}

TEST(Operations, AreDescribedByWhatTellsThemApart) {
  Operation all_reduce{OperationKind::kAllReduce, DType::kFloat32, ReduceOp::kSum};
  all_reduce.count = 1000;
  EXPECT_EQ(describe(all_reduce), "all_reduce(sum) of 1000 float32");
  all_reduce.reduce_op = ReduceOp::kProduct;
  EXPECT_EQ(describe(all_reduce), "all_reduce(product) of 1000 float32");
  EXPECT_EQ(describe(some_operation()), "broadcast of 10 float32, root 1");
  EXPECT_EQ(describe({OperationKind::kBarrier}), "barrier");
  Operation gradients{OperationKind::kGradients};
  gradients.count = 4;
  gradients.round = 7;
  EXPECT_EQ(describe(gradients), "gradient averaging of 4 buckets (round 7)");
}

TEST(Operations, AreDescribedByTheirShapeWhenItIsKnown) {
  Operation operation = some_operation();
  operation.shape = {5, 2};
  EXPECT_EQ(describe(operation), "broadcast of [5, 2] float32, root 1");
  operation.shape = Shape(nullptr, 0);
  EXPECT_EQ(describe(operation), "broadcast of [] float32, root 1");
}

TEST(Operations, OfEveryKindHaveTheirOwnName) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(OperationKind::kWithdrawal); ++kind) {
    names.insert(name(static_cast<OperationKind>(kind)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(OperationKind::kWithdrawal) + 1);
  EXPECT_EQ(names.count("unknown operation"), 0u);
}

TEST(ControlBlocks, AreFreshWhenTheirMemoryIsZero) {
  alignas(RankControl) unsigned char memory[sizeof(RankControl)];
  std::memset(memory, 0, sizeof(memory));
  const auto* const control = std::launder(reinterpret_cast<const RankControl*>(memory));
  EXPECT_EQ(control->state.load(), RankState::kRunning);
  EXPECT_EQ(control->announced.load(), 0u);
  EXPECT_EQ(control->staged.load(), 0u);
  EXPECT_EQ(control->consumed.load(), 0u);
  EXPECT_EQ(control->event.value.load(), 0u);
  EXPECT_EQ(control->event.sleepers.load(), 0u);
  EXPECT_EQ(control->doorbell.value.load(), 0u);
  EXPECT_EQ(control->outbox.load(), 0u);
  EXPECT_EQ(control->places[0].sequence.load(), 0u);
  EXPECT_EQ(control->places[1].sequence.load(), 0u);
  EXPECT_EQ(control->interruptions.load(), 0u);
  EXPECT_EQ(control->withdrawals[0].sequence.load(), 0u);
  EXPECT_EQ(control->withdrawals[1].sequence.load(), 0u);
}

TEST(ControlBlocks, HaveTheLayoutThatTheirHeaderDescribes) {
  EXPECT_EQ(offsetof(RankControl, event), 0u);
  EXPECT_EQ(offsetof(RankControl, state), 8u);
  EXPECT_EQ(offsetof(RankControl, pid), 12u);
  EXPECT_EQ(offsetof(RankControl, announced), 16u);
  EXPECT_EQ(offsetof(RankControl, staged), 24u);
  EXPECT_EQ(offsetof(RankControl, consumed), 32u);
  EXPECT_EQ(offsetof(RankControl, failed_in), 40u);
  EXPECT_EQ(offsetof(RankControl, doorbell), 48u);
  EXPECT_EQ(offsetof(RankControl, outbox), 56u);
  EXPECT_EQ(offsetof(RankControl, awaited_in_transfer), 60u);
  EXPECT_EQ(offsetof(RankControl, interruptions), 64u);
  EXPECT_EQ(offsetof(RankControl, awaited_in_collective), 72u);
  EXPECT_EQ(offsetof(RankControl, operations), 128u);
  EXPECT_LE(sizeof(RankControl), 4096u) << "the counts begin there";
}

}  // namespace
}  // namespace accelerate_cpp::comm
