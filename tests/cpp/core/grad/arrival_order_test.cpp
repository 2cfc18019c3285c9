#include "core/grad/arrival_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/grad/gradient_exchanges.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::soon;
using ::testing::ElementsAre;

TEST(ArrivalOrder, IsThatOfRankZeroOnAllRanksAndThenByNumber) {
  comm::testing::run_ranks(3, [](comm::Communicator& communicator) {
    ArrivalOrder order(5);
    if (communicator.rank() == 0) {
      order.note(3);
      order.note(1);
    } else {
      order.note(0);
    }
    EXPECT_FALSE(order.is_learnt());
    EXPECT_THAT(order.learn(communicator, soon()), ElementsAre(3, 1, 0, 2, 4));
    EXPECT_TRUE(order.is_learnt());
  });
}

TEST(ArrivalOrder, ForgetsWhatArrivedInAPassThatWasNotCompleted) {
  comm::testing::run_ranks(1, [](comm::Communicator& communicator) {
    ArrivalOrder order(3);
    order.note(2);
    order.begin_pass();
    order.note(1);
    EXPECT_THAT(order.learn(communicator, soon()), ElementsAre(1, 0, 2));
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
