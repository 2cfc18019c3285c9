#include "core/comm/solo.h"

#include <gtest/gtest.h>

#include "core/comm/communicator_conformance.h"

namespace accelerate_cpp::comm {
namespace {

TEST(Solo, ConformsToCommunicator) {
  SoloCommunicator communicator;
  testing::check_all(communicator);
}

TEST(Solo, RefusesOperationsOnceAborted) {
  SoloCommunicator communicator;
  communicator.abort("the disk is full");
  try {
    communicator.barrier(testing::soon());
    FAIL() << "expected PeerLost";
  } catch (const PeerLost& error) {
    EXPECT_NE(std::string(error.what()).find("the disk is full"), std::string::npos);
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm
