#include "core/comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/comm/ranks.h"
#include "core/comm/solo.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shm_communicator.h"
#endif

namespace accelerate_cpp::comm {
namespace {

TEST(Communicator, StaysUsableWhenItLeavesAndNobodyCanBeTold) {
  SoloCommunicator communicator;
  communicator.leave();
  communicator.barrier(testing::soon());
}

#if defined(ACCELERATE_HAS_SHM)
TEST(Communicator, TellsPeersThatItHasLeftAlthoughItIsKept) {
  testing::run_threads(2, [](Store& store, int rank) {
    static std::shared_ptr<Communicator> kept;
    const auto communicator = ShmCommunicator::connect(store, rank, 2, testing::soon(), {});
    communicator->barrier(testing::soon());
    if (rank == 1) {
      kept = communicator;
      communicator->leave();
    } else {
      const std::string message = testing::message_of<PeerLost>([&] { communicator->barrier(testing::soon()); });
      EXPECT_THAT(message, ::testing::HasSubstr("rank 1 has left"));
    }
  });
}
#endif

}  // namespace
}  // namespace accelerate_cpp::comm
