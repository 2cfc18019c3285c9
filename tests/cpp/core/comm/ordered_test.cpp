#include "core/comm/ordered.h"
#include "core/grad/make_gradient_exchange.h"

#include <gtest/gtest.h>

#include "core/comm/communicator_conformance.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {

using namespace grad;
namespace {

using testing::Operand;
using testing::soon;

TEST(OrderedCommunicator, ConformsToCommunicator) {
  OrderedCommunicator communicator(std::make_shared<SoloCommunicator>(), std::make_shared<WorkQueue>());
  testing::check_all(communicator);
}

TEST(OrderedCommunicator, RunsWhatWasIssuedBefore) {
  const auto inner = std::make_shared<SoloCommunicator>();
  const auto queue = std::make_shared<WorkQueue>();
  OrderedCommunicator communicator(inner, queue);
  bool ran = false;
  const auto pending = queue->issue([&ran] { ran = true; });
  communicator.barrier(soon());
  EXPECT_TRUE(ran);
  EXPECT_TRUE(pending->ended());
}

TEST(OrderedCommunicator, MeetsAfterWhatWasIssuedBefore) {
  const auto queue = std::make_shared<WorkQueue>();
  OrderedCommunicator communicator(std::make_shared<SoloCommunicator>(), queue);
  const auto pending = queue->issue([] {});
  EXPECT_EQ(communicator.meet("a topic", soon()), std::vector<int>{0});
  EXPECT_TRUE(pending->ended());
}

TEST(OrderedCommunicator, FinishesGradientsAfterWhatWasIssuedBefore) {
  const auto queue = std::make_shared<WorkQueue>();
  OrderedCommunicator communicator(std::make_shared<SoloCommunicator>(), queue);
  const auto exchange = make_gradient_exchange(communicator, {{DType::kFloat32, 4, {{0, 4}}}}, soon());
  exchange->publish(0);
  bool ran = false;
  const auto pending = queue->issue([&ran] { ran = true; });
  exchange->finish(soon());
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace accelerate_cpp::comm
