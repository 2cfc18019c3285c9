#include "torch_bridge/c10d_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "torch_bridge/engines_of_threads.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Network;
using testing::soon;

constexpr std::uint32_t kDataSlot = 1;

class Ports : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(C10dPort, Ports, ::testing::Values("gloo", "mpi"));

ConstMemoryView view(const std::string& text) {
  return {text.data(), text.size(), DType::kUInt8};
}

MemoryView view(std::string& text) {
  return {text.data(), text.size(), DType::kUInt8};
}

TEST_P(Ports, CarryMessagesThatCanBePolledAndWaitedFor) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    const int peer = 1 - engine->rank();
    std::string polled(5, ' ');
    std::string waited(3, ' ');
    const auto first = port->receive(view(polled), peer, MessageMatcher::kEnvelopeSlot, soon());
    const auto second = port->receive(view(waited), peer, kDataSlot, soon());
    {
      const std::string text = "hello";
      const auto sent = port->send(view(text), peer, MessageMatcher::kEnvelopeSlot, soon());
      EXPECT_TRUE(sent->poll());  // the text may go
    }
    port->send(view(std::string("abc")), peer, kDataSlot, soon())->wait(soon());
    while (!first->poll()) {
      std::this_thread::yield();
    }
    EXPECT_EQ(polled, "hello");
    second->wait(soon());
    EXPECT_EQ(waited, "abc");
    EXPECT_EQ(second->source(), peer);
  });
}

TEST_P(Ports, LeaveAMessagePostedWhenAWaitForItTimesOut) {
  Network network(GetParam());
  std::atomic<bool> timed_out{false};
  testing::run_engines(network, 2, [&](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto message = port->receive(view(text), 1, kDataSlot, soon());
      EXPECT_THAT(message_of<Timeout>([&] { message->wait(Deadline::after(milliseconds(20))); }),
                  HasSubstr("receive from rank 1 has not completed"));
      EXPECT_FALSE(message->poll());
      timed_out = true;
      message->wait(soon());
      EXPECT_EQ(text, "ok");
    } else {
      while (!timed_out) {
        std::this_thread::yield();
      }
      port->send(view(std::string("ok")), 0, kDataSlot, soon());
      std::string never(1, ' ');
      port->receive(view(never), 0, kDataSlot, soon());  // going away does not wait for it
    }
  });
}

TEST_P(Ports, RaiseWhenAPeerIsLost) {
  Network network(GetParam());
  std::atomic<int> posted{0};
  testing::run_engines(network, 2, [&](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    const auto message = port->receive(view(text), 1 - engine->rank(), kDataSlot, soon());
    ++posted;
    while (posted < 2) {
      std::this_thread::yield();
    }
    network.wires()[0]->broken = true;
    EXPECT_THAT(message_of<PeerLost>([&] { message->wait(soon()); }), HasSubstr("Connection closed by peer"));
  });
}

TEST_P(Ports, RaiseInAWaitWhenARankHasFailed) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto message = port->receive(view(text), 1, kDataSlot, soon());
      EXPECT_THAT(message_of<PeerLost>([&] { message->wait(soon()); }), HasSubstr("rank 1 failed: no more"));
      EXPECT_THROW(port->send(view(text), 1, kDataSlot, soon()), PeerLost);
    } else {
      engine->fail("no more");
    }
  });
}

TEST_P(Ports, FlushWhatWasSent) {
  Network network(GetParam());
  testing::run_engines(network, 2, [&](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text = engine->rank() == 0 ? "bye" : "   ";
    if (engine->rank() == 0) {
      port->send(view(text), 1, kDataSlot, soon());
      EXPECT_TRUE(port->flush(soon()));
    } else {
      port->receive(view(text), 0, kDataSlot, soon())->wait(soon());
      EXPECT_EQ(text, "bye");
    }
  });
}

TEST_P(Ports, RaiseInAWaitForARankThatHasLeft) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto message = port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon());
      EXPECT_THAT(message_of<PeerLeft>([&] { message->wait(soon()); }), HasSubstr("rank 1 has left the group"));
      EXPECT_TRUE(message->poll());
      EXPECT_THROW(message->wait(soon()), PeerLeft);
    } else {
      engine->leave(0, port->num_sent());
    }
  });
}

// A rank that leaves closes its connections, which the engine takes for the loss of a peer.
TEST_P(Ports, TellARankThatHasLeftFromOneThatIsLost) {
  for (const std::uint64_t num_sent : {0, 1}) {
    Network network(GetParam());
    std::atomic<bool> posted{false};
    testing::run_engines(network, 2, [&](const auto& engine) {
      const auto port = C10dPort::make(engine);
      if (engine->rank() == 0) {
        std::string text(2, ' ');
        const auto first = port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon());
        posted = true;
        while (!first->poll()) {
          std::this_thread::yield();
        }
        const auto second = [&] { port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon()); };
        const std::string left = "receive from rank 1 on rank 0: rank 1 has left the group without sending";
        if (num_sent == 0) {
          EXPECT_EQ(message_of<PeerLeft>([&] { first->wait(soon()); }), left);
        } else {  // and what it had sent did not come
          EXPECT_THAT(message_of<PeerLost>([&] { first->wait(soon()); }), HasSubstr("Connection closed by peer"));
        }
        EXPECT_EQ(message_of<PeerLeft>(second), left);
      } else {
        while (!posted) {
          std::this_thread::yield();
        }
        engine->leave(0, {num_sent, 0});
        network.wires()[0]->broken = true;
      }
    });
  }
}

// As those do that wait for several ranks in turn, or for whichever comes first.
TEST_P(Ports, LearnInShortWaitsThatARankHasLeft) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto message = port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon());
      while (!message->poll()) {
        EXPECT_ANY_THROW(message->wait(Deadline::after(milliseconds(1))));
      }
      EXPECT_THROW(message->wait(soon()), PeerLeft);
      for (int turn = 0; turn < 2; ++turn) {
        EXPECT_THAT(message_of<PeerLeft>([&] { port->send(view(text), 1, MessageMatcher::kEnvelopeSlot, soon()); }),
                    HasSubstr("send to rank 1 on rank 0: it has left the group"));
      }
    } else {
      engine->leave(0, port->num_sent());
    }
  });
}

TEST_P(Ports, KeepWhatAWaitHasFoundForThoseThatPoll) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto late = port->receive(view(text), 1, kDataSlot, Deadline::after(milliseconds(1)));
      EXPECT_THROW(late->wait(soon()), Timeout);
      EXPECT_TRUE(late->poll());
      const auto lost = port->receive(view(text), 1, kDataSlot, soon());
      EXPECT_FALSE(lost->poll());
      engine->store()->set("posted", std::vector<std::uint8_t>{1});
      EXPECT_THROW(lost->wait(soon()), PeerLost);
      EXPECT_TRUE(lost->poll());
    } else {
      engine->store()->wait({"posted"});
      engine->fail("no more");
    }
  });
}

TEST_P(Ports, HoldUpNoDataOfOthersForARankThatIsSlow) {
  Network network(GetParam());
  std::atomic<bool> received{false};
  testing::run_engines(network, 3, [&](const auto& engine) {
    const auto port = C10dPort::make(engine);
    std::string slow(2, ' ');
    std::string text(2, ' ');
    if (engine->rank() == 0) {
      const auto first = port->receive(view(slow), 1, kDataSlot, soon());
      const auto second = port->receive(view(text), 2, kDataSlot, soon());
      second->wait(soon());
      EXPECT_EQ(text, "ok");
      received = true;
      first->wait(soon());
      EXPECT_EQ(slow, "at");
    } else {
      while (engine->rank() == 1 && !received) {
        std::this_thread::yield();
      }
      port->send(view(std::string(engine->rank() == 1 ? "at" : "ok")), 0, kDataSlot, soon());
      EXPECT_TRUE(port->flush(soon()));
    }
  });
}

TEST_P(Ports, WaitForWhatARankHasSentBeforeItLeft) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    if (engine->rank() == 0) {
      std::string text(2, ' ');
      const auto first = port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon());
      EXPECT_THROW(first->wait(Deadline::after(milliseconds(500))), Timeout);  // the message is still on its way
      const auto second = port->receive(view(text), 1, MessageMatcher::kEnvelopeSlot, soon());
      EXPECT_THROW(second->wait(soon()), PeerLeft);
    } else {
      EXPECT_EQ(port->num_sent(), (std::vector<std::uint64_t>{0, 0}));
      engine->leave(0, {1, 0});
    }
  });
}

TEST_P(Ports, CountTheEnvelopesThatTheySend) {
  Network network(GetParam());
  testing::run_engines(network, 2, [](const auto& engine) {
    const auto port = C10dPort::make(engine);
    const int peer = 1 - engine->rank();
    port->send(view(std::string("a")), peer, MessageMatcher::kEnvelopeSlot, soon());
    port->send(view(std::string("b")), peer, kDataSlot, soon());
    EXPECT_EQ(port->num_sent()[static_cast<std::size_t>(peer)], 1u);
    std::string text(1, ' ');
    port->receive(view(text), peer, MessageMatcher::kEnvelopeSlot, soon())->wait(soon());
    port->receive(view(text), peer, kDataSlot, soon())->wait(soon());
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
