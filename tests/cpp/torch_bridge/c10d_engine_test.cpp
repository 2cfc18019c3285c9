#include "torch_bridge/c10d_engine.h"

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

class Engines : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(C10dEngine, Engines, ::testing::Values("gloo", "mpi"));

TEST_P(Engines, CarryBlocksOfAnySizeAndNothingWithThemselves) {
  Network network(GetParam());
  testing::run_engines(network, 3, [](const auto& engine) {
    const int rank = engine->rank();
    // Rank a gives 4 * a + b bytes to rank b.
    std::string given(static_cast<std::size_t>(4 * rank + 2), static_cast<char>('a' + rank));
    std::vector<ConstMemoryView> inputs;
    std::vector<std::size_t> expected;
    for (int r = 0; r < 3; ++r) {
      inputs.emplace_back(given.data(), static_cast<std::size_t>(4 * rank + r), DType::kUInt8);
      expected.push_back(static_cast<std::size_t>(4 * r + rank));
    }
    C10dEngine::Operation operation{"test", 1};
    C10dEngine::AllToAll blocks(*engine, inputs, expected, soon(), operation);
    given.assign(given.size(), '?');  // it has been copied
    blocks.finish(soon(), operation);
    for (int r = 0; r < 3; ++r) {
      const std::string text(reinterpret_cast<const char*>(blocks.from(r)),
                             r == rank ? 0 : static_cast<std::size_t>(4 * r + rank));
      EXPECT_EQ(text, std::string(text.size(), static_cast<char>('a' + r)));
    }
  });
}

TEST_P(Engines, LetOneRankTellAllThatShareTheStore) {
  Network network(GetParam());
  testing::run_threads(2, [&](Store&, int rank) {
    const auto everyone = network.connect(rank, 2, {}, "everyone");
    const auto leaders = network.connect(rank, 2, {}, "leaders");
    if (rank == 1) {
      leaders->fail("out of memory");
      EXPECT_THROW(leaders->check_usable("barrier"), PeerLost);
      return;
    }
    C10dEngine::Operation operation{"barrier", 1};
    const auto wait = [&] {
      while (true) {
        everyone->look_around(soon(), operation);
      }
    };
    EXPECT_THAT(message_of<PeerLost>(wait), HasSubstr("barrier on rank 0: rank 1 failed: out of memory"));
  });
}

TEST(C10dEngine, KeepsTheFirstReason) {
  Network network("gloo");
  const auto engine = network.connect(0, 1);
  engine->fail("first");
  engine->fail("second");
  EXPECT_THAT(message_of<PeerLost>([&] { engine->check_usable("send"); }), HasSubstr("first"));
}

TEST(C10dEngine, TimesOutWhileItLooksAround) {
  Network network("gloo");
  const auto engine = network.connect(0, 1);
  C10dEngine::Operation operation{"barrier", 1};
  engine->look_around(soon(), operation);
  EXPECT_FALSE(operation.warned);
  EXPECT_THAT(message_of<Timeout>([&] { engine->look_around(Deadline::after(milliseconds(0)), operation); }),
              HasSubstr("barrier on rank 0 has not completed after"));
}

TEST(C10dEngine, WaitsInVainOnlyForOperationsAfterADeparture) {
  Network network("gloo");
  const auto engine = network.connect(0, 1, {}, "one");
  network.connect(0, 1, {}, "other")->leave(0, {});
  network.connect(0, 1, {}, "one")->leave(5, {});
  C10dEngine::Operation last{"barrier", 5};
  C10dEngine::Operation next{"broadcast", 6};
  engine->look_around(soon(), last);
  EXPECT_THAT(message_of<PeerLost>([&] { engine->look_around(soon(), next); }),
              HasSubstr("broadcast on rank 0: rank 0 has left the group without this operation"));
}

TEST(C10dEngine, TranslatesErrorsIntoTheReasonThatARankHasGiven) {
  Network network("gloo");
  const auto own = network.connect(0, 1, {}, "one");
  network.connect(0, 1, {}, "other")->fail("its disk is full");
  const std::exception_ptr error = own->translated(std::runtime_error("Connection reset"), {"broadcast"});
  EXPECT_THAT(message_of<PeerLost>([&] { std::rethrow_exception(error); }),
              HasSubstr("broadcast on rank 0: rank 0 failed: its disk is full"));
}

TEST(C10dEngine, BlamesNoRankForWhatDoesNotTellOfAClosedConnection) {
  Network network("gloo");
  testing::run_engines(network, 2, [](const auto& engine) {
    EXPECT_THAT(message_of<PeerLost>([&] {
                  std::rethrow_exception(engine->translated(std::runtime_error("no memory"), {"barrier", 1}));
                }),
                HasSubstr("barrier on " + engine->who() + ": a rank was lost: no memory"));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
