#include "core/comm/shm/channel.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/segment.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr auto kLong = std::chrono::milliseconds(100000);

struct Sockets {
  Sockets() {
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
      throw SystemFailure("socketpair", errno);
    }
  }
  int ends[2];
};

// Two connected channels.
struct Pair {
  Pair() : Pair(Sockets()) {}
  explicit Pair(const Sockets& sockets)
      : a(std::make_unique<Channel>(sockets.ends[0])), b(std::make_unique<Channel>(sockets.ends[1])) {}
  std::unique_ptr<Channel> a;
  std::unique_ptr<Channel> b;
};

std::string event(char sign, std::uint32_t segment) {
  return std::string(1, sign).append(std::to_string(segment));
}

// What arrives at `channel`, in order: "+3" for segment 3 announced, "-3" for it released.
std::vector<std::string> drain(Channel& channel) {
  std::vector<std::string> events;
  channel.drain(
      [&](std::uint32_t segment, int descriptor) {
        EXPECT_EQ(::close(descriptor), 0);
        events.push_back(event('+', segment));
      },
      [&](std::uint32_t segment) { events.push_back(event('-', segment)); });
  return events;
}

ino_t inode_of(int descriptor) {
  struct stat status{};
  EXPECT_EQ(::fstat(descriptor, &status), 0);
  return status.st_ino;
}

TEST(Channels, HandOverADescriptorOfTheSameFile) {
  Pair pair;
  const auto segment = Segment::create(1);
  pair.a->announce(5, segment->descriptor());
  ASSERT_TRUE(pair.a->flush());
  int announcements = 0;
  pair.b->drain(
      [&](std::uint32_t id, int descriptor) {
        ++announcements;
        EXPECT_EQ(id, 5u);
        EXPECT_NE(descriptor, segment->descriptor());
        EXPECT_EQ(inode_of(descriptor), inode_of(segment->descriptor()));
        EXPECT_NE(::fcntl(descriptor, F_GETFD) & FD_CLOEXEC, 0);
        ::close(descriptor);
      },
      [](std::uint32_t) { FAIL() << "nothing was released"; });
  EXPECT_EQ(announcements, 1);
  EXPECT_GE(::fcntl(segment->descriptor(), F_GETFD), 0) << "the sender keeps its own";
}

TEST(Channels, DeliverAnnouncementsAndReleasesOnceAndInOrder) {
  Pair pair;
  const auto segment = Segment::create(1);
  pair.a->announce(1, segment->descriptor());
  pair.a->announce(2, segment->descriptor());
  pair.a->release(1);
  pair.a->announce(3, segment->descriptor());
  pair.a->release(3);
  EXPECT_THAT(drain(*pair.b), IsEmpty()) << "nothing is sent before flush()";
  ASSERT_TRUE(pair.a->flush());
  EXPECT_THAT(drain(*pair.b), ElementsAre("+1", "+2", "-1", "+3", "-3"));
  EXPECT_THAT(drain(*pair.b), IsEmpty());
}

TEST(Channels, CarryMessagesBothWays) {
  Pair pair;
  pair.a->release(1);
  pair.b->release(2);
  ASSERT_TRUE(pair.a->flush());
  ASSERT_TRUE(pair.b->flush());
  EXPECT_THAT(drain(*pair.a), ElementsAre("-2"));
  EXPECT_THAT(drain(*pair.b), ElementsAre("-1"));
}

TEST(Channels, KeepWhatAFullSocketDoesNotTakeAndSendItLater) {
  Pair pair;
  const auto segment = Segment::create(1);
  std::vector<std::string> expected;
  std::uint32_t id = 0;
  do {  // until the socket really is full
    pair.a->announce(id, segment->descriptor());
    expected.push_back(event('+', id++));
  } while (pair.a->flush() && id < 100000);
  EXPECT_FALSE(pair.a->flush()) << "no " << id << " messages fill this socket";
  for (int i = 0; i < 5; ++i) {
    pair.a->release(id);
    expected.push_back(event('-', id++));
  }
  std::vector<std::string> received = drain(*pair.b);
  EXPECT_LT(received.size(), expected.size());
  while (!pair.a->flush()) {
    const std::vector<std::string> more = drain(*pair.b);
    received.insert(received.end(), more.begin(), more.end());
  }
  const std::vector<std::string> last = drain(*pair.b);
  received.insert(received.end(), last.begin(), last.end());
  EXPECT_EQ(received, expected);
}

TEST(Channels, SeeThePeersEndWhenTheyDrain) {
  Pair pair;
  EXPECT_THAT(drain(*pair.a), IsEmpty());
  EXPECT_FALSE(pair.a->closed());
  pair.b.reset();
  EXPECT_THAT(drain(*pair.a), IsEmpty());
  EXPECT_TRUE(pair.a->closed());
}

TEST(Channels, DropWhatIsMeantForAPeerThatHasEnded) {
  Pair pair;
  pair.b.reset();
  pair.a->release(1);
  pair.a->release(2);
  EXPECT_TRUE(pair.a->flush());
  pair.a->release(3);
  EXPECT_TRUE(pair.a->flush());
  EXPECT_THAT(drain(*pair.a), IsEmpty());
  EXPECT_TRUE(pair.a->closed());
}

TEST(Channels, DeliverWhatThePeerSentBeforeItsEndEvenAfterSendingToIt) {
  Pair pair;
  pair.b->release(1);
  ASSERT_TRUE(pair.b->flush());
  pair.b.reset();
  pair.a->release(2);
  EXPECT_TRUE(pair.a->flush());
  EXPECT_THAT(drain(*pair.a), ElementsAre("-1"));
  EXPECT_TRUE(pair.a->closed());
}

TEST(Channels, DeliverWhatWasSentBeforeThePeerEnded) {
  Pair pair;
  pair.a->release(1);
  pair.a->release(2);
  ASSERT_TRUE(pair.a->flush());
  pair.a.reset();
  EXPECT_THAT(drain(*pair.b), ElementsAre("-1", "-2"));
  EXPECT_TRUE(pair.b->closed());
}

TEST(Channels, DeliverWhatWasSentBeforeThePeerEndedEvenIfThePeerHadNotReadAll) {
  Pair pair;
  pair.b->release(7);
  ASSERT_TRUE(pair.b->flush());
  pair.a->release(1);
  pair.a->release(2);
  ASSERT_TRUE(pair.a->flush());
  pair.a.reset();
  EXPECT_THAT(drain(*pair.b), ElementsAre("-1", "-2"));
  EXPECT_THAT(drain(*pair.b), IsEmpty());
  EXPECT_TRUE(pair.b->closed());
}

TEST(Channels, WaitUntilAMessageOrThePeersEndIsThere) {
  Pair pair;
  pair.a->wait_readable(std::chrono::milliseconds(0));
  pair.b->release(1);
  ASSERT_TRUE(pair.b->flush());
  pair.a->wait_readable(kLong);
  EXPECT_THAT(drain(*pair.a), ElementsAre("-1"));
  pair.b.reset();
  pair.a->wait_readable(kLong);
  EXPECT_THAT(drain(*pair.a), IsEmpty());
  EXPECT_TRUE(pair.a->closed());
}

TEST(Channels, TellThatThePeerHungUpBeforeItsMessagesAreRead) {
  Pair pair;
  pair.b->release(1);
  ASSERT_TRUE(pair.b->flush());
  EXPECT_FALSE(pair.a->hung_up());
  pair.b.reset();
  EXPECT_TRUE(pair.a->hung_up());
  EXPECT_THAT(drain(*pair.a), ElementsAre("-1"));
}

TEST(Channels, KnowTheProcessOfTheirPeer) {
  const Pair pair;
  EXPECT_EQ(pair.a->peer_pid(), ::getpid());
}

TEST(Channels, RefuseAnAnnouncementWhoseDescriptorDidNotArrive) {
  const Sockets sockets;
  Channel channel(sockets.ends[0]);
  const std::uint32_t announcement[2] = {1, 9};
  ASSERT_EQ(::send(sockets.ends[1], announcement, sizeof(announcement), 0), 8);
  EXPECT_THAT([&] { drain(channel); }, ThrowsMessage<SystemFailure>(HasSubstr("RLIMIT_NOFILE")));
  ::close(sockets.ends[1]);
}

// Sends a packet with so many descriptors of standard input.
void send_packet(int socket, const std::string& bytes, int descriptors) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptors > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(static_cast<std::size_t>(descriptors) * sizeof(int));
    cmsghdr* const attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(static_cast<std::size_t>(descriptors) * sizeof(int));  // zeros: standard input
  }
  ASSERT_EQ(::sendmsg(socket, &header, 0), static_cast<ssize_t>(bytes.size()));
}

std::string packet(std::uint32_t kind) {
  return std::string(reinterpret_cast<const char*>(&kind), sizeof(kind)) + std::string(4, '\0');
}

TEST(Channels, RefuseWhatNoRankSendsAndKeepNoDescriptorOfIt) {
  const auto next_descriptor = [] {
    const int descriptor = ::dup(0);
    ::close(descriptor);
    return descriptor;
  };
  const std::pair<std::string, int> wrong[] = {{packet(9), 0}, {packet(9), 1},       {packet(1), 2}, {packet(2), 1},
                                               {packet(3), 1}, {packet(1) + "x", 1}, {"\1", 1},      {"\1", 0}};
  for (const auto& [bytes, descriptors] : wrong) {
    const Sockets sockets;
    Channel channel(sockets.ends[0]);
    send_packet(sockets.ends[1], bytes, descriptors);
    const int before = next_descriptor();
    EXPECT_THAT([&] { drain(channel); }, ThrowsMessage<SystemFailure>(HasSubstr("that no rank of this version sends")));
    EXPECT_EQ(next_descriptor(), before);
    ::close(sockets.ends[1]);
  }
}

class ChannelInAForkedChild : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kThreadSanitizer) {
      GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
    }
  }

  template <class Check>
  static bool in_child(const Check& check) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(check() ? 0 : 1);
    }
    return testing::wait_process(child) == 0;
  }
};

TEST_F(ChannelInAForkedChild, SendsNothingAndTakesNothingFromItsParent) {
  Pair pair;
  pair.b->release(1);
  ASSERT_TRUE(pair.b->flush());
  pair.a->release(2);
  EXPECT_TRUE(in_child([&] {
    const bool pretends_to_have_sent = pair.a->flush();
    return drain(*pair.a).empty() && pair.a->closed() && pretends_to_have_sent;
  }));
  EXPECT_THAT(drain(*pair.b), IsEmpty());
  EXPECT_THAT(drain(*pair.a), ElementsAre("-1"));
  EXPECT_FALSE(pair.a->closed());
  EXPECT_TRUE(pair.a->flush());
  EXPECT_THAT(drain(*pair.b), ElementsAre("-2"));
}

TEST_F(ChannelInAForkedChild, DoesNotTouchAFileThatHasTakenTheNumberOfItsSocket) {
  const Sockets sockets;
  Pair pair(sockets);
  EXPECT_TRUE(in_child([&] {
    const Sockets reused;  // the lowest free numbers: those of the closed sockets
    pair.a->release(1);
    pair.a->flush();
    pair.a.reset();
    pair.b.reset();
    char byte = 0;
    return (reused.ends[0] == sockets.ends[0] || reused.ends[0] == sockets.ends[1]) &&
           ::fcntl(reused.ends[0], F_GETFD) >= 0 && ::recv(reused.ends[1], &byte, 1, MSG_DONTWAIT) < 0 &&
           errno == EAGAIN;
  }));
}

TEST_F(ChannelInAForkedChild, LeavesTheChildsOwnChannelsAloneWhenItIsDestroyed) {
  Pair inherited;
  EXPECT_TRUE(in_child([&] {
    Pair own;  // on the numbers of the closed sockets
    inherited.a.reset();
    inherited.b.reset();
    own.a->release(1);
    return own.a->flush() && drain(*own.b) == std::vector<std::string>{"-1"} && !own.b->closed();
  }));
}

TEST_F(ChannelInAForkedChild, DoesNotMakeADeadParentLookAlive) {
  Pair pair;
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(hold[1]);
    ::_exit(static_cast<int>(::read(hold[0], &byte, 1)));
  }
  pair.a.reset();
  pair.b->wait_readable(kLong);  // the child may not have got to closing its copies yet
  EXPECT_THAT(drain(*pair.b), IsEmpty());
  EXPECT_TRUE(pair.b->closed());
  ::close(hold[0]);
  ::close(hold[1]);
  EXPECT_EQ(testing::wait_process(child), 0);
}

}  // namespace
}  // namespace accelerate_cpp::comm
