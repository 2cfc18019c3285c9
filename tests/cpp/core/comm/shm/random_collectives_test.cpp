// Random programs of collectives over shared memory; random_programs.h says how to replay one.
#include <gtest/gtest.h>

#include "core/comm/random_programs.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

std::shared_ptr<Communicator> connect(Store& store, int rank, int size, std::uint64_t) {
  return ShmCommunicator::connect(store, rank, size, testing::soon(), {});
}

TEST(RandomCollectives, DoWhatPlainLoopsDo) {
  testing::run_random_programs(connect);
}

TEST(RandomCollectives, DoWhatPlainLoopsDoWhereAllOperandsAreStaged) {
  testing::run_random_programs(connect, {{testing::Placement::kHeap}});
}

}  // namespace
}  // namespace accelerate_cpp::comm
