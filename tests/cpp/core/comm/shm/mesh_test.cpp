#include "core/comm/shm/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::soon;
using ::testing::ThrowsMessage;

using Channels = std::vector<std::unique_ptr<Channel>>;

constexpr auto kLong = std::chrono::milliseconds(100000);
constexpr std::size_t kTokenBytes = 16;
const InterruptProbe kNoProbe = [] {};

Deadline passed() {
  return Deadline::after(std::chrono::milliseconds(0));
}

std::ptrdiff_t count_open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

// What is sent over `channel` stands for a rank.
void say(Channel& channel, int rank) {
  channel.release(static_cast<std::uint32_t>(rank));
  EXPECT_TRUE(channel.flush());
}

int hear(Channel& channel) {
  int heard = -1;
  while (heard < 0 && !channel.closed()) {
    channel.wait_readable(kLong);
    channel.drain([](std::uint32_t, int) {}, [&](std::uint32_t rank) { heard = static_cast<int>(rank); });
  }
  return heard;
}

class MeshOfSize : public ::testing::TestWithParam<int> {};

TEST_P(MeshOfSize, ConnectsEveryTwoRanks) {
  testing::run_threads(GetParam(), [](Store& store, int rank) {
    const Channels channels = connect_mesh(store, rank, GetParam(), soon(), kNoProbe);
    ASSERT_EQ(channels.size(), static_cast<std::size_t>(GetParam()));
    for (int peer = 0; peer < GetParam(); ++peer) {
      Channel* const channel = channels[static_cast<std::size_t>(peer)].get();
      EXPECT_EQ(channel == nullptr, peer == rank);
      if (channel != nullptr) {
        say(*channel, rank);
      }
    }
    for (int peer = 0; peer < GetParam(); ++peer) {
      if (peer != rank) {
        EXPECT_EQ(hear(*channels[static_cast<std::size_t>(peer)]), peer);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, MeshOfSize, ::testing::Values(1, 2, 3, 8));

TEST(Mesh, LeavesNoDescriptorBehind) {
  const auto before = count_open_descriptors();
  testing::run_threads(3, [](Store& store, int rank) { connect_mesh(store, rank, 3, soon(), kNoProbe); });
  EXPECT_EQ(count_open_descriptors(), before);
}

// A connection that is no rank's: it knows the address of rank 0, as everybody on the host can.
class Rogue {
 public:
  explicit Rogue(Store& store) : published_(store.get("shm/address/0", soon())) {
    socket_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string name = published_.substr(kTokenBytes);
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    EXPECT_EQ(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), length), 0);
  }
  ~Rogue() { hang_up(); }
  Rogue(const Rogue&) = delete;
  Rogue& operator=(const Rogue&) = delete;

  std::string token() const { return published_.substr(0, kTokenBytes); }

  void greet(const std::string& token, std::int32_t rank) {
    std::string greeting = token;
    greeting.append(reinterpret_cast<const char*>(&rank), sizeof(rank));
    send(greeting);
  }

  void send(const std::string& message) {
    EXPECT_EQ(::send(socket_, message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
  }

  // Waits for a message or for the other end to close the connection; whether it was the latter.
  bool was_refused() {
    char byte = 0;
    return ::recv(socket_, &byte, 1, 0) <= 0;
  }

  void hang_up() {
    if (socket_ >= 0) {
      ::close(socket_);
      socket_ = -1;
    }
  }

 private:
  std::string published_;
  int socket_ = -1;
};

// Rank 0 of a group of two in a thread of its own.
class RankZero {
 public:
  using Probe = std::function<void(const RankZero&)>;

  explicit RankZero(Probe probe = [](const RankZero&) {})
      : thread_([this, probe] {
          try {
            channels_ = connect_mesh(store, 0, 2, soon(), [&] { probe(*this); });
          } catch (const std::exception& error) {
            failure_ = error.what();
          }
        }) {}

  // Lets the true rank 1 come and checks that rank 0 is connected with it.
  void expect_connects_to_rank_one() {
    const Channels of_one = connect_mesh(store, 1, 2, soon(), kNoProbe);
    rank_one_has_come = true;
    thread_.join();
    ASSERT_EQ(failure_, "") << "although rank 1 has connected";
    say(*of_one[0], 1);
    EXPECT_EQ(hear(*channels_[1]), 1);
  }

  MemoryStore store;
  std::atomic<bool> rank_one_has_come{false};

 private:
  Channels channels_;
  std::string failure_;
  std::thread thread_;
};

TEST(Mesh, RefusesAConnectionWithAWrongToken) {
  RankZero zero;
  Rogue rogue(zero.store);
  rogue.greet(std::string(kTokenBytes, 'x'), 1);
  EXPECT_TRUE(rogue.was_refused());
  zero.expect_connects_to_rank_one();
}

TEST(Mesh, RefusesRanksThatDoNotConnectToThisOne) {
  RankZero zero;
  for (const std::int32_t rank : {-1, 0, 2, 1000000}) {
    Rogue rogue(zero.store);
    rogue.greet(rogue.token(), rank);
    EXPECT_TRUE(rogue.was_refused()) << rank;
  }
  zero.expect_connects_to_rank_one();
}

TEST(Mesh, RefusesAShortGreeting) {
  RankZero zero;
  Rogue rogue(zero.store);
  rogue.send(rogue.token());
  EXPECT_TRUE(rogue.was_refused());
  zero.expect_connects_to_rank_one();
}

TEST(Mesh, GoesOnAfterAConnectionThatEndsWithoutAGreeting) {
  RankZero zero;
  Rogue(zero.store).hang_up();
  zero.expect_connects_to_rank_one();
}

TEST(Mesh, IsNotHeldUpByAConnectionThatNeverGreets) {
  int probes = 0;
  RankZero zero([&](const RankZero& self) {
    if (self.rank_one_has_come && ++probes > 100) {
      throw Timeout("rank 1 has connected long ago");
    }
  });
  const Rogue rogue(zero.store);
  zero.expect_connects_to_rank_one();
}

TEST(Mesh, RefusesASecondConnectionOfTheSameRank) {
  MemoryStore store;
  Channels of_zero;
  std::thread zero([&] { of_zero = connect_mesh(store, 0, 3, soon(), kNoProbe); });
  Rogue one(store);
  one.greet(one.token(), 1);
  Rogue again(store);
  again.greet(again.token(), 1);
  EXPECT_TRUE(again.was_refused());
  Rogue two(store);
  two.greet(two.token(), 2);
  zero.join();
  ASSERT_EQ(of_zero.size(), 3u);
  say(*of_zero[1], 0);
  EXPECT_FALSE(one.was_refused()) << "the first one keeps its place";
}

TEST(Mesh, SaysHowManyRanksAreMissing) {
  MemoryStore store;
  EXPECT_THAT([&] { connect_mesh(store, 0, 3, passed(), kNoProbe); },
              ThrowsMessage<Timeout>(AllOf(HasSubstr("rank 0"), HasSubstr("2 more of 3 ranks"))));
}

TEST(Mesh, NamesTheLowerRankThatIsMissing) {
  MemoryStore store;
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, passed(), kNoProbe); }, ThrowsMessage<Timeout>(HasSubstr("address/0")));
}

TEST(Mesh, SaysThatARankHasEndedSinceItPublishedItsAddress) {
  MemoryStore store;
  store.set("shm/address/0", std::string(kTokenBytes, 'x') + "accelerate_cpp-gone");
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoProbe); },
              ThrowsMessage<SystemFailure>(HasSubstr("connecting to rank 0")));
}

TEST(Mesh, RefusesAnAddressThatIsNone) {
  MemoryStore store;
  store.set("shm/address/0", "short");
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoProbe); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rank 0")));
}

TEST(Mesh, StopsWaitingWhenTheProbeThrowsAndLeavesNoDescriptorBehind) {
  struct Interrupted {};
  const auto before = count_open_descriptors();
  MemoryStore store;
  EXPECT_THROW(connect_mesh(store, 0, 2, soon(), [] { throw Interrupted(); }), Interrupted);
  EXPECT_EQ(count_open_descriptors(), before);
}

TEST(Mesh, PublishesADifferentTokenAndAddressEachTime) {
  MemoryStore one;
  MemoryStore other;
  EXPECT_THROW(connect_mesh(one, 0, 2, passed(), kNoProbe), Timeout);
  EXPECT_THROW(connect_mesh(other, 0, 2, passed(), kNoProbe), Timeout);
  const std::string first = one.get("shm/address/0", soon());
  const std::string second = other.get("shm/address/0", soon());
  EXPECT_NE(first.substr(0, kTokenBytes), second.substr(0, kTokenBytes));
  EXPECT_NE(first.substr(kTokenBytes), second.substr(kTokenBytes));
}

}  // namespace
}  // namespace accelerate_cpp::comm
