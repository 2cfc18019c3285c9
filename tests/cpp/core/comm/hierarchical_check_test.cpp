#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/hosts_of_threads.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_hosts;
using testing::soon;

TEST(Hierarchical, LetsSomeRanksMeetWhileOthersAreInAnOperation) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    const int rank = communicator.rank();
    for (const std::vector<int>& there : {std::vector<int>{0}, {3}, {0, 2}, {0, 1}, {1, 2, 3}}) {
      if (std::find(there.begin(), there.end(), rank) != there.end()) {
        EXPECT_EQ(communicator.meet("save", soon()), there);
      }
      float value = static_cast<float>(rank);
      communicator.all_reduce({&value, 1, DType::kFloat32}, ReduceOp::kSum, soon());
      EXPECT_EQ(value, 6.0f);
    }
  });
}

TEST(Hierarchical, LetsARankMeetAloneOnceAnotherHasLeft) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    communicator.barrier(soon());
    if (communicator.rank() == 3) {
      communicator.leave();
    } else {
      EXPECT_EQ(communicator.meet("save", soon()), std::vector<int>{communicator.rank()});
    }
  });
}

TEST(Hierarchical, MissesARankThatHasFailedInAMeetingAndThenKnowsThatItWillNotCome) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    communicator.barrier(soon());
    if (communicator.rank() == 3) {
      communicator.abort("its disk is full");
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.meet("save", soon()); }), HasSubstr("its disk is full"));
    }
    EXPECT_EQ(communicator.meet("save", soon()), std::vector<int>{communicator.rank()});
  });
}

TEST(Hierarchical, RaisesAMismatchBetweenHostsOnEveryRankAndStaysUsable) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    std::vector<float> data(8, 1.0f);
    const std::size_t count = communicator.rank() < 2 ? 8 : 6;
    const std::string message = message_of<MismatchedCollective>([&] {
      communicator.all_reduce({data.data(), count, DType::kFloat32}, ReduceOp::kSum, Call(soon(), {}, "train.py:7"));
    });
    for (int r = 0; r < 4; ++r) {
      EXPECT_THAT(message, HasSubstr("rank " + std::to_string(r) + ": all_reduce(sum) of " + (r < 2 ? "8" : "6") +
                                     " float32 at train.py:7"));
    }
    communicator.all_reduce({data.data(), data.size(), DType::kFloat32}, ReduceOp::kSum, soon());
    EXPECT_EQ(data, std::vector<float>(8, 4.0f));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
