#include "core/comm/shm/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/mesh_talk.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::Channels;
using ::testing::HasSubstr;
using testing::hear;
using testing::kNoHooks;
using ::testing::MatchesRegex;
using testing::probing;
using testing::say;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr std::size_t kTokenBytes = 16;

Deadline passed() {
  return Deadline::after(std::chrono::milliseconds(0));
}

std::ptrdiff_t count_open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

// Ranks keep their channels until all are connected, which they know when they have heard from everyone.
void meet(const Channels& channels, int rank) {
  for (const auto& channel : channels) {
    if (channel) {
      say(*channel, rank);
    }
  }
  for (std::size_t peer = 0; peer < channels.size(); ++peer) {
    if (channels[peer]) {
      EXPECT_EQ(hear(*channels[peer]), static_cast<int>(peer));
    }
  }
}

class MeshOfSize : public ::testing::TestWithParam<int> {};

TEST_P(MeshOfSize, ConnectsEveryTwoRanks) {
  testing::run_threads(GetParam(), [](Store& store, int rank) {
    const Channels channels = connect_mesh(store, rank, GetParam(), soon(), kNoHooks);
    ASSERT_EQ(channels.size(), static_cast<std::size_t>(GetParam()));
    for (int peer = 0; peer < GetParam(); ++peer) {
      EXPECT_EQ(channels[static_cast<std::size_t>(peer)] == nullptr, peer == rank);
    }
    meet(channels, rank);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, MeshOfSize, ::testing::Values(1, 2, 3, 8));

TEST(Mesh, LeavesNoDescriptorBehind) {
  const auto before = count_open_descriptors();
  testing::run_threads(3, [](Store& store, int rank) { meet(connect_mesh(store, rank, 3, soon(), kNoHooks), rank); });
  EXPECT_EQ(count_open_descriptors(), before);
}

// A later group of the same ranks may get the same part of a store; who comes first must not find the addresses of the
// earlier one.
TEST(Mesh, LeavesNoAddressInTheStore) {
  MemoryStore store;
  const auto form = [&store](int rank) { meet(connect_mesh(store, rank, 2, soon(), kNoHooks), rank); };
  auto peer = std::async(std::launch::async, form, 1);
  form(0);
  peer.get();
  for (int rank = 0; rank < 2; ++rank) {
    const std::string key = "shm/address/" + std::to_string(rank);
    EXPECT_THROW(store.get(key, passed()), Timeout) << key;
  }
}

TEST(Mesh, NamesTheRanksThatAreMissing) {
  MemoryStore store;
  EXPECT_THAT([&] { connect_mesh(store, 0, 2, passed(), kNoHooks); },
              ThrowsMessage<Timeout>(AllOf(HasSubstr("rank 0 waited"), HasSubstr("ms for rank 1 in vain"))));
  EXPECT_THAT([&] { connect_mesh(store, 0, 4, passed(), kNoHooks); },
              ThrowsMessage<Timeout>(HasSubstr("ms for ranks 1, 2, 3 in vain")));
}

TEST(Mesh, NamesTheLowerRankThatIsMissing) {
  MemoryStore store;
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, passed(), kNoHooks); },
              ThrowsMessage<Timeout>(MatchesRegex(".*rank 1 waited [0-9]+ ms for rank 0 in vain.*")));
}

TEST(Mesh, SaysThatARankHasEndedSinceItPublishedItsAddress) {
  MemoryStore store;
  store.set("shm/address/0", std::string(kTokenBytes, 'x') + "accelerate_cpp-gone");
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoHooks); },
              ThrowsMessage<PeerLost>(HasSubstr("connecting to rank 0 on this host: it has ended")));
}

TEST(Mesh, ReportsOnceThatRanksAreLate) {
  std::promise<std::string> sentence;
  std::shared_future<std::string> reported(sentence.get_future());
  int reports = 0;
  WaitHooks hooks;
  hooks.warn_after = std::chrono::milliseconds(0);
  hooks.warn = [&](const std::string& text) {
    if (++reports == 1) {
      sentence.set_value(text);
    }
  };
  testing::run_threads(3, [&](Store& store, int rank) {
    if (rank > 0) {
      EXPECT_THAT(reported.get(), HasSubstr("a group of 3 ranks: rank 0 waited"));
    }
    meet(connect_mesh(store, rank, 3, soon(), rank == 0 ? hooks : kNoHooks), rank);
  });
  EXPECT_EQ(reports, 1);
}

TEST(Mesh, RefusesAnAddressThatIsNone) {
  MemoryStore store;
  store.set("shm/address/0", "short");
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoHooks); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rank 0")));
}

TEST(Mesh, RefusesAnAddressThatIsTooLong) {
  MemoryStore store;
  store.set("shm/address/0", std::string(kTokenBytes, 't') + std::string(300, 'x'));
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoHooks); },
              ThrowsMessage<InvalidArgument>(HasSubstr("address of 300 bytes")));
}

struct Interrupted {};
const WaitHooks kInterrupting = probing([] { throw Interrupted(); });

TEST(Mesh, StopsWaitingWhenTheProbeThrowsAndLeavesNoDescriptorBehind) {
  const auto before = count_open_descriptors();
  MemoryStore store;
  EXPECT_THROW(connect_mesh(store, 0, 2, soon(), kInterrupting), Interrupted);
  EXPECT_EQ(count_open_descriptors(), before);
}

TEST(Mesh, CanBeInterruptedWhileItWaitsForAnAddress) {
  MemoryStore store;
  EXPECT_THROW(connect_mesh(store, 1, 2, soon(), kInterrupting), Interrupted);
}

TEST(Mesh, PublishesADifferentTokenAndAddressEachTime) {
  MemoryStore one;
  MemoryStore other;
  EXPECT_THROW(connect_mesh(one, 0, 2, passed(), kNoHooks), Timeout);
  EXPECT_THROW(connect_mesh(other, 0, 2, passed(), kNoHooks), Timeout);
  const std::string first = one.get("shm/address/0", soon());
  const std::string second = other.get("shm/address/0", soon());
  EXPECT_NE(first.substr(0, kTokenBytes), second.substr(0, kTokenBytes));
  EXPECT_NE(first.substr(kTokenBytes), second.substr(kTokenBytes));
}

}  // namespace
}  // namespace accelerate_cpp::comm
