#include "core/comm/split_store.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {
namespace {

using testing::soon;

// Runs `body` on each of `size` ranks with a communicator of all of them.
template <class Body>
void run_ranks(int size, const Body& body) {
  testing::run_threads(size, [&](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, size, soon(), {});
    body(*communicator);
  });
}

TEST(SplitStores, GatherTheRanksOfAColorInTheOrderOfTheirKeys) {
  run_ranks(5, [](Communicator& parent) {
    const int color = parent.rank() % 2;
    const SplitStore store(parent, color, -parent.rank(), soon());
    const std::vector<int> members = color == 0 ? std::vector<int>{4, 2, 0} : std::vector<int>{3, 1};
    EXPECT_EQ(store.members(), members);
    EXPECT_EQ(store.new_size(), static_cast<int>(members.size()));
    EXPECT_EQ(members[static_cast<std::size_t>(store.new_rank())], parent.rank());
  });
}

TEST(SplitStores, KeepTheOrderOfRanksWhoseKeysAreEqual) {
  run_ranks(4, [](Communicator& parent) {
    const SplitStore store(parent, 7, parent.rank() == 3 ? 0 : 1, soon());
    EXPECT_EQ(store.members(), (std::vector<int>{3, 0, 1, 2}));
  });
}

TEST(SplitStores, HandOverWhatTheRanksOfTheSameColorHaveSet) {
  run_ranks(4, [](Communicator& parent) {
    const int color = parent.rank() / 2;
    SplitStore store(parent, color, 0, soon());
    for (const std::string round : {"first", "second"}) {
      store.set(round + std::to_string(store.new_rank()), round + " of parent rank " + std::to_string(parent.rank()));
    }
    for (int rank = 0; rank < 2; ++rank) {
      const std::string who = " of parent rank " + std::to_string(2 * color + rank);
      EXPECT_EQ(store.get("first" + std::to_string(rank), soon()), "first" + who);
      EXPECT_EQ(store.get("second" + std::to_string(rank), soon()), "second" + who);
    }
  });
}

TEST(SplitStores, CarryAnyBytes) {
  run_ranks(2, [](Communicator& parent) {
    SplitStore store(parent, 0, 0, soon());
    const std::string value("\0a\xff\n", 4);
    store.publish("key" + std::to_string(parent.rank()), parent.rank() == 0 ? value : "");
    EXPECT_EQ(store.get("key0", soon()), value);
    EXPECT_EQ(store.get("key1", soon()), "");
  });
}

TEST(SplitStores, KeepColorsApartThatUseTheSameKeys) {
  run_ranks(3, [](Communicator& parent) {
    SplitStore store(parent, parent.rank(), 0, soon());
    store.set("address", std::to_string(parent.rank()));
    EXPECT_EQ(store.get("address", soon()), std::to_string(parent.rank()));
  });
}

TEST(SplitStores, SayThatNobodyHasSetAKeyInsteadOfWaitingForIt) {
  SoloCommunicator parent;
  SplitStore store(parent, 0, 0, soon());
  EXPECT_EQ(store.new_size(), 1);
  EXPECT_THROW(store.get("address", Deadline::never()), InternalError);
}

TEST(SplitStores, RefuseWhatDoesNotFitIntoOneRecord) {
  SoloCommunicator parent;
  SplitStore store(parent, 0, 0, soon());
  EXPECT_NO_THROW(store.set("key", std::string(245, 'x')));
  EXPECT_EQ(store.get("key", soon()), std::string(245, 'x'));
  EXPECT_THROW(store.set("key", std::string(246, 'x')), InternalError);
}

}  // namespace
}  // namespace accelerate_cpp::comm
