// Random programs of collectives over what torch reaches, alone and between hosts; random_programs.h says how to replay
// one.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/comm/hierarchical.h"
#include "core/comm/hosts_of_threads.h"
#include "core/comm/random_programs.h"
#include "torch_bridge/c10d_communicator.h"
#include "torch_bridge/engines_of_threads.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Network;

// The network that the ranks of the program with a seed share.
class Networks {
 public:
  Network& of(std::uint64_t seed) {
    const std::lock_guard lock(mutex_);
    if (seed != seed_) {
      seed_ = seed;
      network_ = std::make_unique<Network>("gloo");
    }
    return *network_;
  }

 private:
  std::mutex mutex_;
  std::uint64_t seed_ = 0;
  std::unique_ptr<Network> network_;
};

testing::Drawn in_any_order() {
  testing::Drawn drawn;
  drawn.in_rank_order = false;
  return drawn;
}

TEST(RandomCollectivesOverTorch, DoWhatPlainLoopsDo) {
  Networks networks;
  const auto connect = [&](Store&, int rank, int size, std::uint64_t seed) -> std::shared_ptr<Communicator> {
    return std::make_shared<C10dCommunicator>(networks.of(seed).connect(rank, size), true);
  };
  testing::run_random_programs(connect, in_any_order());
}

TEST(RandomCollectivesOverTorch, DoWhatPlainLoopsDoBetweenHosts) {
  Networks networks;
  const auto connect = [&](Store& store, int rank, int size, std::uint64_t seed) -> std::shared_ptr<Communicator> {
    const HostLayout layout(testing::draw_hosts(size, seed));
    const auto far = [&](const std::string& name, int own_rank, int own_size) {
      return std::make_shared<C10dCommunicator>(networks.of(seed).connect(own_rank, own_size, {}, name), false);
    };
    Hierarchical::Parts parts;
    const int host = layout.host_of(rank);
    parts.inside = testing::connect_part(store, "host" + std::to_string(host), layout.index_within_host(rank),
                                         static_cast<int>(layout.ranks_of(host).size()), {});
    parts.everyone = far("everyone", rank, size);
    if (layout.is_on_rail(rank)) {
      parts.rail = far("rail" + std::to_string(layout.index_within_host(rank)), host, layout.num_hosts());
    }
    return std::make_shared<Hierarchical>(layout, parts, WaitHooks{});
  };
  testing::run_random_programs(connect, in_any_order());
}

}  // namespace
}  // namespace accelerate_cpp::comm
