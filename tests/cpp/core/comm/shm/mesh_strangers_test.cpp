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
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
using testing::probing;
using testing::say;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr std::size_t kTokenBytes = 16;

int make_socket() {
  return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

// An abstract address.
struct Address {
  explicit Address(const std::string& name)
      : length(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())) {
    socket_address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), socket_address.sun_path + 1);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket_address); }

  sockaddr_un socket_address{};
  const socklen_t length;
};

// A connection that is no rank's: it knows the address of rank 0, as everybody on the host can.
class Rogue {
 public:
  explicit Rogue(Store& store) : Rogue(store.get("shm/address/0", soon())) {}
  explicit Rogue(std::string published) : published_(std::move(published)) {
    const Address address(published_.substr(kTokenBytes));
    EXPECT_EQ(::connect(socket_, address.get(), address.length), 0);
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

  // The connection may have been refused before this.
  void send(const std::string& message) { ::send(socket_, message.data(), message.size(), MSG_NOSIGNAL); }

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
  int socket_ = make_socket();
};

// Rank 0 of a group of two in a thread of its own.
class RankZero {
 public:
  using Probe = std::function<void(const RankZero&)>;

  explicit RankZero(Probe probe = [](const RankZero&) {})
      : thread_([this, probe] {
          try {
            channels_ = connect_mesh(store, 0, 2, soon(), probing([&] { probe(*this); }));
          } catch (const std::exception& error) {
            failure_ = error.what();
          }
        }) {}

  // Lets the true rank 1 come and checks that rank 0 is connected with it.
  void expect_connects_to_rank_one() {
    const Channels of_one = connect_mesh(store, 1, 2, soon(), kNoHooks);
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

TEST(MeshAmongStrangers, RefusesAConnectionWithAWrongToken) {
  RankZero zero;
  Rogue rogue(zero.store);
  rogue.greet(std::string(kTokenBytes, 'x'), 1);
  EXPECT_TRUE(rogue.was_refused());
  zero.expect_connects_to_rank_one();
}

TEST(MeshAmongStrangers, RefusesRanksThatDoNotConnectToThisOne) {
  RankZero zero;
  for (const std::int32_t rank : {-1, 0, 2, 1000000}) {
    Rogue rogue(zero.store);
    rogue.greet(rogue.token(), rank);
    EXPECT_TRUE(rogue.was_refused()) << rank;
  }
  zero.expect_connects_to_rank_one();
}

TEST(MeshAmongStrangers, RefusesAShortGreeting) {
  RankZero zero;
  Rogue rogue(zero.store);
  rogue.send(rogue.token());
  EXPECT_TRUE(rogue.was_refused());
  zero.expect_connects_to_rank_one();
}

TEST(MeshAmongStrangers, GoesOnAfterAConnectionThatEndsWithoutAGreeting) {
  RankZero zero;
  Rogue(zero.store).hang_up();
  zero.expect_connects_to_rank_one();
}

TEST(MeshAmongStrangers, IsNotHeldUpByAConnectionThatNeverGreets) {
  int probes = 0;
  RankZero zero([&](const RankZero& self) {
    if (self.rank_one_has_come && ++probes > 100) {
      throw Timeout("rank 1 has connected long ago");
    }
  });
  const Rogue rogue(zero.store);
  zero.expect_connects_to_rank_one();
}

// Whoever floods a rank would otherwise take all its descriptors, and its run with them.
TEST(MeshAmongStrangers, KeepsFewConnectionsThatNeverGreet) {
  RankZero zero;
  std::vector<std::unique_ptr<Rogue>> rogues;
  for (int i = 0; i < 200; ++i) {
    rogues.push_back(std::make_unique<Rogue>(zero.store));
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(rogues[static_cast<std::size_t>(i)]->was_refused());
  }
  zero.expect_connects_to_rank_one();
}

TEST(MeshAmongStrangers, RefusesASecondConnectionOfTheSameRank) {
  MemoryStore store;
  Channels of_zero;
  std::thread zero([&] { of_zero = connect_mesh(store, 0, 3, soon(), kNoHooks); });
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

TEST(MeshAmongStrangers, SaysThatARankHasEndedBeforeTheOthersHaveCome) {
  MemoryStore store;
  std::string message;
  std::thread zero(
      [&] { message = testing::message_of<PeerLost>([&] { connect_mesh(store, 0, 3, soon(), kNoHooks); }); });
  Rogue one(store);
  one.greet(one.token(), 1);
  one.hang_up();
  zero.join();
  EXPECT_THAT(message, AllOf(HasSubstr("ms for rank 2; rank 1 has ended")));
}

TEST(MeshAmongStrangers, CanBeInterruptedWhileStrangersFillTheQueueOfAPeer) {
  const Address address("accelerate_cpp-crowded-" + std::to_string(::getpid()));
  const int listener = make_socket();
  ASSERT_EQ(::bind(listener, address.get(), address.length), 0);
  ASSERT_EQ(::listen(listener, 0), 0);
  std::vector<int> strangers;
  do {
    strangers.push_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  } while (::connect(strangers.back(), address.get(), address.length) == 0);
  MemoryStore store;
  store.set("shm/address/0", std::string(kTokenBytes, 'x') + (address.socket_address.sun_path + 1));
  struct Interrupted {};
  EXPECT_THROW(connect_mesh(store, 1, 2, soon(), probing([] { throw Interrupted(); })), Interrupted);
  for (const int stranger : strangers) {
    ::close(stranger);
  }
  ::close(listener);
}

// What runs as another user of the machine.
class MeshAmongUsers : public ::testing::Test {
 protected:
  static constexpr uid_t kOther = 65534;

  void SetUp() override {
    if (testing::kThreadSanitizer) {
      GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
    }
    if (::geteuid() != 0) {
      GTEST_SKIP() << "only root may become another user";
    }
  }

  // Returns the process, which exits with 0 when `check` holds.
  template <class Check>
  static pid_t start_as_other_user(const Check& check) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(::setresuid(kOther, kOther, kOther) == 0 && check() ? 0 : 1);
    }
    return child;
  }
};

TEST_F(MeshAmongUsers, RefusesAnotherUserEvenWithTheRightToken) {
  RankZero zero;
  const std::string published = zero.store.get("shm/address/0", soon());
  EXPECT_EQ(testing::wait_process(start_as_other_user([&] {
              Rogue rogue(published);
              rogue.greet(rogue.token(), 1);
              return rogue.was_refused();
            })),
            0);
  zero.expect_connects_to_rank_one();
}

TEST_F(MeshAmongUsers, DoesNotGreetAListenerOfAnotherUser) {
  const Address address("accelerate_cpp-other-" + std::to_string(::getpid()));
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t other = start_as_other_user([&] {
    const int listener = make_socket();
    const bool listens = ::bind(listener, address.get(), address.length) == 0 && ::listen(listener, 1) == 0 &&
                         ::write(ready[1], "", 1) == 1;
    const int accepted = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    char byte = 0;
    return listens && ::recv(accepted, &byte, 1, 0) == 0;  // the end, and nothing before it
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  MemoryStore store;
  store.set("shm/address/0", std::string(kTokenBytes, 'x') + (address.socket_address.sun_path + 1));
  EXPECT_THAT([&] { connect_mesh(store, 1, 2, soon(), kNoHooks); },
              ThrowsMessage<SystemFailure>(HasSubstr("rank 0, which runs as another user")));
  EXPECT_EQ(testing::wait_process(other), 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace accelerate_cpp::comm
