#include "torch_bridge/c10d_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/communicator_conformance.h"
#include "torch_bridge/engines_of_threads.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Network;
using ::testing::Not;
using testing::soon;

struct Setting {
  int size;
  std::string engine;
  bool check_calls;
};

class Settings : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(C10dCommunicator, Settings,
                         ::testing::Values(Setting{2, "gloo", true}, Setting{3, "gloo", false},
                                           Setting{4, "mpi", true}));

TEST_P(Settings, ConformToCommunicator) {
  Network network(GetParam().engine);
  testing::run_engines(network, GetParam().size, [](const auto& engine) {
    C10dCommunicator communicator(engine, GetParam().check_calls);
    testing::check_all(communicator);
  });
}

// Runs C10dCommunicators that check their calls over an engine that behaves like Gloo.
void run_ranks(int size, const std::function<void(C10dCommunicator& communicator)>& body, const WaitHooks& hooks = {}) {
  Network network("gloo");
  testing::run_engines(
      network, size,
      [&](const auto& engine) {
        C10dCommunicator communicator(engine);
        body(communicator);
      },
      hooks);
}

TEST(C10dCommunicator, GivesTheSameBitsOnAllRanksForLargeOperands) {
  std::vector<std::vector<float>> results(3);
  run_ranks(3, [&](C10dCommunicator& communicator) {
    std::vector<float> data(2500001);  // three parts of slices
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = 1.0f / static_cast<float>(i + 1 + 7 * static_cast<std::size_t>(communicator.rank()));
    }
    communicator.all_reduce({data.data(), data.size(), DType::kFloat32}, ReduceOp::kSum, soon());
    results[static_cast<std::size_t>(communicator.rank())] = data;
  });
  for (const std::vector<float>& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)), 0);
  }
  EXPECT_FLOAT_EQ(results[0][0], 1.0f + 1.0f / 8 + 1.0f / 15);
  EXPECT_FLOAT_EQ(results[0][2500000], 1.0f / 2500001 + 1.0f / 2500008 + 1.0f / 2500015);
}

TEST(C10dCommunicator, BroadcastsLargeOperandsInSlices) {
  for (int root = 0; root < 3; ++root) {
    run_ranks(3, [root](C10dCommunicator& communicator) {
      std::vector<std::int64_t> data(700001);
      for (std::size_t i = 0; i < data.size() && communicator.rank() == root; ++i) {
        data[i] = static_cast<std::int64_t>(i);
      }
      communicator.broadcast({data.data(), data.size(), DType::kInt64}, root, soon());
      for (std::size_t i = 0; i < data.size(); ++i) {
        ASSERT_EQ(data[i], static_cast<std::int64_t>(i));
      }
    });
  }
}

TEST(C10dCommunicator, MovesNoMoreBytesThanAnAllReduceNeeds) {
  for (const int size : {2, 4}) {
    Network network("gloo");
    testing::run_engines(network, size, [](const auto& engine) {
      C10dCommunicator communicator(engine, false);
      std::vector<float> data(1000000);
      communicator.all_reduce({data.data(), data.size(), DType::kFloat32}, ReduceOp::kSum, soon());
    });
    // Every rank gives (size - 1) / size of it twice; two ranks give all of it once.
    EXPECT_EQ(network.wires()[0]->num_bytes, 2u * 4000000u * static_cast<std::size_t>(size - 1)) << size;
  }
}

TEST(C10dCommunicator, RaisesAMismatchOnEveryRankAndStaysUsable) {
  run_ranks(3, [](C10dCommunicator& communicator) {
    std::vector<float> data(5, 1.0f);
    const auto reduce = [&](std::size_t count) {
      communicator.all_reduce({data.data(), count, DType::kFloat32}, ReduceOp::kMax, Call(soon(), {}, "train.py:88"));
    };
    EXPECT_THAT(message_of<MismatchedCollective>([&] { reduce(communicator.rank() == 1 ? 4 : 5); }),
                AllOf(HasSubstr("rank 0: all_reduce(max) of 5 float32 at train.py:88"),
                      HasSubstr("rank 1: all_reduce(max) of 4 float32 at train.py:88")));
    reduce(5);
  });
}

TEST(C10dCommunicator, TellsAllRanksWhyOneGaveUp) {
  run_ranks(3, [](C10dCommunicator& communicator) {
    if (communicator.rank() == 2) {
      communicator.abort("the disk is full");
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                  AllOf(HasSubstr("barrier on rank " + std::to_string(communicator.rank())),
                        HasSubstr("rank 2 failed: the disk is full")));
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                AllOf(HasSubstr("cannot run"), HasSubstr("the disk is full")));
  });
}

TEST(C10dCommunicator, TimesOutAndTellsTheOthers) {
  std::atomic<bool> over{false};
  run_ranks(2, [&](C10dCommunicator& communicator) {
    if (communicator.rank() == 0) {
      EXPECT_THAT(message_of<Timeout>([&] { communicator.barrier(Deadline::after(milliseconds(20))); }),
                  HasSubstr("barrier on rank 0 has not completed after"));
      over = true;
    } else {
      while (!over) {
        std::this_thread::yield();
      }
      // What rank 0 had sent before it gave up may still complete the first one.
      const auto barriers = [&] {
        communicator.barrier(soon());
        communicator.barrier(soon());
      };
      EXPECT_THAT(message_of<PeerLost>(barriers), HasSubstr("rank 0 failed: barrier"));
    }
  });
}

TEST(C10dCommunicator, EndsAWaitWhenTheProbeThrows) {
  WaitHooks hooks;
  hooks.probe = [] { throw std::runtime_error("Ctrl-C"); };
  run_ranks(
      2,
      [](C10dCommunicator& communicator) {
        if (communicator.rank() == 0) {
          EXPECT_THAT(message_of<std::runtime_error>([&] { communicator.barrier(soon()); }), HasSubstr("Ctrl-C"));
        }
      },
      hooks);
}

TEST(C10dCommunicator, ReportsALongWaitOnce) {
  std::atomic<int> warnings{0};
  WaitHooks hooks;
  hooks.warn_after = milliseconds(1);
  hooks.warn = [&](const std::string& text) {
    EXPECT_THAT(text, HasSubstr("barrier on rank 0 has waited for other hosts"));
    ++warnings;
  };
  run_ranks(
      2,
      [&](C10dCommunicator& communicator) {
        while (communicator.rank() == 1 && warnings == 0) {
          std::this_thread::yield();
        }
        communicator.barrier(soon());
      },
      hooks);
  EXPECT_EQ(warnings, 1);
}

TEST(C10dCommunicator, TellsTheOthersThatItLeavesAndLosesNoMessage) {
  run_ranks(2, [](C10dCommunicator& communicator) {
    std::int64_t value = 42;
    const MemoryView data{&value, 1, DType::kInt64};
    communicator.barrier(soon());
    if (communicator.rank() == 0) {
      communicator.send(data, 1, 0, soon());
      communicator.leave();
    } else {
      value = 0;
      communicator.receive(data, 0, 0, soon())->wait(soon());
      EXPECT_EQ(value, 42);
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                  HasSubstr("rank 0 has left the group without this operation"));
    }
  });
}

TEST(C10dCommunicator, CallsRanksByTheirNumbers) {
  Network network("gloo");
  WaitHooks hooks;
  hooks.numbers = {5, 7};
  testing::run_engines(
      network, 2,
      [&](const auto& engine) {
        C10dCommunicator communicator(engine);
        communicator.barrier(soon());
        if (communicator.rank() == 1) {
          return communicator.leave();
        }
        EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                    HasSubstr("barrier on rank 5: rank 7 has left the group without this operation"));
      },
      hooks);
}

TEST(C10dCommunicator, LosesAPeerWhenTheEngineFails) {
  Network network("gloo");
  WaitHooks hooks;
  hooks.numbers = {5, 7};
  std::atomic<int> passed{0};
  testing::run_engines(
      network, 2,
      [&](const auto& engine) {
        C10dCommunicator communicator(engine);
        communicator.barrier(soon());
        ++passed;
        while (passed < 2) {
          std::this_thread::yield();
        }
        network.wires()[0]->broken = true;
        const std::string closed = " was lost: Connection closed by peer [10.0.0.2]:7777";
        EXPECT_THAT(
            message_of<PeerLost>([&] { communicator.barrier(soon()); }),  // either rank may tell the other first
            AllOf(
                AnyOf(HasSubstr("barrier on rank 5: rank 7" + closed), HasSubstr("barrier on rank 7: rank 5" + closed)),
                Not(HasSubstr("typically")), Not(HasSubstr("where that was found"))));
      },
      hooks);
}

TEST(C10dCommunicator, TellsWhoHasLeftWhereTheEngineSeesAClosedConnection) {
  Network network("gloo");
  std::atomic<bool> has_left{false};
  testing::run_engines(network, 2, [&](const auto& engine) {
    C10dCommunicator communicator(engine);
    communicator.barrier(soon());
    if (communicator.rank() == 1) {
      communicator.leave();
      network.wires()[0]->broken = true;
      has_left = true;
      return;
    }
    while (!has_left) {
      std::this_thread::yield();
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                HasSubstr("barrier on rank 0: rank 1 has left the group without this operation"));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
