// Random programs of collectives over hosts, which are drawn, too; random_programs.h says how to replay one.
#include <gtest/gtest.h>

#include <vector>

#include "core/comm/hosts_of_threads.h"
#include "core/comm/random_programs.h"

namespace accelerate_cpp::comm {
namespace {

TEST(RandomCollectivesOverHosts, DoWhatPlainLoopsDo) {
  const auto connect = [](Store& store, int rank, int size, std::uint64_t seed) -> std::shared_ptr<Communicator> {
    return testing::connect_hosts(store, rank, testing::draw_hosts(size, seed));
  };
  testing::Drawn drawn;
  drawn.in_rank_order = false;
  testing::run_random_programs(connect, drawn);
}

}  // namespace
}  // namespace accelerate_cpp::comm
