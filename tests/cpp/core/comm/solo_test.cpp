#include "core/comm/solo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/comm/communicator_conformance.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Operand;
using testing::soon;
using ::testing::ThrowsMessage;

TEST(Solo, ConformsToCommunicator) {
  SoloCommunicator communicator;
  testing::check_all(communicator);
}

TEST(Solo, RefusesOperationsOnceAborted) {
  SoloCommunicator communicator;
  communicator.abort("the disk is full");
  EXPECT_THAT([&] { communicator.barrier(soon()); },
              ThrowsMessage<PeerLost>(AllOf(HasSubstr("barrier cannot run"), HasSubstr("the disk is full"))));
  communicator.abort("out of memory");
  EXPECT_THAT([&] { communicator.all_reduce(Operand(1, DType::kInt8).view(), ReduceOp::kSum, soon()); },
              ThrowsMessage<PeerLost>(HasSubstr("the disk is full")));
}

TEST(Solo, StaysUsableAndCountsAnInterruptionWhenItsRankWithdraws) {
  SoloCommunicator communicator;
  communicator.withdraw("out of memory", soon());
  EXPECT_EQ(communicator.interruptions(), 1u);
  communicator.barrier(soon());
}

TEST(Solo, HasNobodyToSendToOrToReceiveFrom) {
  SoloCommunicator communicator;
  const Operand data(1, DType::kInt8);
  EXPECT_THAT([&] { communicator.send(data.view(), 1, 0, soon()); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("send"), HasSubstr("rank 1"))));
  EXPECT_THAT([&] { communicator.receive(data.view(), Communicator::kAnySource, 0, soon()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("receive")));
}

TEST(Solo, RefusesOutputsThatDoNotFitTheirInputs) {
  SoloCommunicator communicator;
  const Operand memory(3, DType::kInt8);
  const MemoryView three = memory.view();
  const MemoryView two{three.data, 2, DType::kInt8};
  EXPECT_THROW(communicator.all_gather(two, {three}, soon()), InvalidArgument);
  EXPECT_THROW(communicator.gather(two, {three}, 0, soon()), InvalidArgument);
  EXPECT_THROW(communicator.scatter({two}, three, 0, soon()), InvalidArgument);
  EXPECT_THROW(communicator.all_to_all({two}, {three}, soon()), InvalidArgument);
  EXPECT_THROW(communicator.reduce_scatter({two}, three, ReduceOp::kSum, soon()), InvalidArgument);
  EXPECT_THROW(communicator.all_to_all({}, {}, soon()), InvalidArgument);
}

TEST(Solo, MultipliesByItsFactorInAPreMultipliedSum) {
  SoloCommunicator communicator;
  Operand data(100, DType::kFloat32);
  communicator.all_reduce(data.fill(3).view(), {ReduceOp::kPreMulSum, 0.5}, soon());
  EXPECT_EQ(
      testing::differences(data.view(), 0, [](std::size_t i) { return 0.5 * testing::operand(3, i, DType::kFloat32); }),
      0u);
}

}  // namespace
}  // namespace accelerate_cpp::comm
