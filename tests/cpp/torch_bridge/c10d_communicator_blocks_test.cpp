// The operations of c10d_communicator_blocks.cpp beyond what conformance covers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/error.h"
#include "torch_bridge/c10d_communicator.h"
#include "torch_bridge/engines_of_threads.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Network;
using testing::soon;

MemoryView view(std::vector<std::int32_t>& values) {
  return {values.data(), values.size(), DType::kInt32};
}

TEST(C10dCommunicatorBlocks, GatherOperandsThatOnlyTheirPairKnowsTheSizeOf) {
  Network network("gloo");
  testing::run_engines(network, 3, [](const auto& engine) {
    C10dCommunicator communicator(engine, false);
    const int rank = communicator.rank();
    std::vector<std::int32_t> own(static_cast<std::size_t>(rank * 1000000), rank);
    std::vector<std::int32_t> from[] = {{}, std::vector<std::int32_t>(1000000), std::vector<std::int32_t>(2000000)};
    std::vector<MemoryView> outputs;
    if (rank == 1) {
      outputs = {view(from[0]), view(from[1]), view(from[2])};
    }
    communicator.gather(view(own), outputs, 1, soon());
    if (rank == 1) {
      EXPECT_THAT(from[1], Each(1));
      EXPECT_THAT(from[2], Each(2));
    }
  });
}

TEST(C10dCommunicatorBlocks, RaiseOnEveryRankWhenTwoDisagreeAboutASize) {
  Network network("gloo");
  testing::run_engines(network, 2, [](const auto& engine) {
    C10dCommunicator communicator(engine);
    std::vector<std::int32_t> own(3);
    std::vector<std::int32_t> from[] = {std::vector<std::int32_t>(3), std::vector<std::int32_t>(4)};
    std::vector<MemoryView> outputs;
    if (communicator.rank() == 0) {
      outputs = {view(from[0]), view(from[1])};
    }
    EXPECT_THAT(message_of<MismatchedCollective>([&] { communicator.gather(view(own), outputs, 0, soon()); }),
                HasSubstr("3 elements are given, 4 expected"));
  });
}

TEST(C10dCommunicatorBlocks, SplitConnectsEachColorOnceAndFailsAlone) {
  Network network("gloo");
  testing::run_engines(network, 4, [&](const auto& engine) {
    C10dCommunicator communicator(engine);
    const auto part = communicator.split(communicator.rank() % 2, -communicator.rank(), soon());
    EXPECT_EQ(part->rank(), communicator.rank() < 2 ? 1 : 0);
    part->abort("enough");
    EXPECT_THROW(part->barrier(soon()), PeerLost);
    communicator.barrier(soon());
  });
  EXPECT_EQ(network.wires().size(), 3u);
}

TEST(C10dCommunicatorBlocks, SplitOfOneRankConnectsNothing) {
  Network network("gloo");
  testing::run_engines(network, 2, [&](const auto& engine) {
    C10dCommunicator communicator(engine);
    EXPECT_EQ(communicator.split(communicator.rank(), 0, soon())->size(), 1);
    EXPECT_EQ(communicator.split(-1, 0, soon()), nullptr);
  });
  EXPECT_EQ(network.wires().size(), 1u);
}

}  // namespace
}  // namespace accelerate_cpp::comm
