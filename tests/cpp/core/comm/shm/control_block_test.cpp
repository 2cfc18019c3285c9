#include "core/comm/shm/control_block.h"

#include <gtest/gtest.h>

#include <cstring>
#include <new>

namespace accelerate_cpp::comm {
namespace {

Operation some_operation() {
  Operation operation{{CallKind::kBroadcast, DType::kFloat32, ReduceOp::kSum}};
  operation.signature.root = 1;
  operation.signature.count = 10;
  return operation;
}

TEST(Operations, DisagreeWhenTheirSignaturesDo) {
  Operation changed = some_operation();
  EXPECT_TRUE(changed.agrees_with(some_operation()));
  changed.signature.root = 0;
  EXPECT_FALSE(changed.agrees_with(some_operation()));
}

TEST(Operations, WhoseOperandsMayDifferInSizeAgreeOnAnyCount) {
  Operation some = some_operation();
  Operation more = some;
  more.signature.count = 11;
  EXPECT_FALSE(some.agrees_with(more));
  some.has_counts = more.has_counts = true;
  EXPECT_TRUE(some.agrees_with(more));
  more.signature.dtype = DType::kInt8;
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
