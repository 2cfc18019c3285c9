#include "torch_bridge/pass_failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "torch_bridge/reducers_of_threads.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::soon;
using testing::Communicator;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

TEST(PassFailure, IsRaisedOnceOnTheOthersWhoGoOn) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    PassFailure failure(communicator, {});
    if (rank == 1) {
      failure.tell("out of memory", false, soon());
      failure.tell("and told again", false, soon());
    } else {
      EXPECT_THAT([&] { communicator->barrier(soon()); }, ThrowsMessage<PeerLost>(HasSubstr("out of memory")));
    }
    EXPECT_NO_THROW(failure.check_group());
    communicator->barrier(soon());
  });
}

TEST(PassFailure, EndsTheDeviceGroupForGood) {
  run_ranks(1, [](const Communicator& communicator, int) {
    int num_ended = 0;
    PassFailure failure(communicator, [&] { ++num_ended; });
    failure.tell("out of memory", false, soon());
    failure.tell("again", false, soon());
    EXPECT_EQ(num_ended, 1);
    EXPECT_THAT([&] { failure.check_group(); }, ThrowsMessage<PeerLost>(HasSubstr("(out of memory)")));
    communicator->barrier(soon());
  });
}

TEST(PassFailure, EndsEverythingWhereOthersMayComplete) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    PassFailure failure(communicator, [] {});
    if (rank == 1) {
      failure.tell("out of memory", true, soon());
    }
    EXPECT_THROW(communicator->barrier(soon()), PeerLost);
    EXPECT_THROW(communicator->barrier(soon()), PeerLost);
  });
}

TEST(PassFailure, EndsTheCollectivesOfAHookAndTheCommunicator) {
  run_ranks(1, [](const Communicator& communicator, int) {
    bool ended = false;
    PassFailure failure(communicator, {});
    failure.set_hook([&] { ended = true; });
    failure.tell("out of memory", false, soon());
    EXPECT_TRUE(ended);
    EXPECT_THROW(communicator->barrier(soon()), PeerLost);
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
