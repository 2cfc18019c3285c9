// Several hosts inside a test: ranks are threads, and shared memory plays the part of the network, too.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/hierarchical.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm::testing {

// A store within another one.
class PrefixedStore final : public Store {
 public:
  PrefixedStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override { store_.set(prefix_ + key, value); }
  std::string get(const std::string& key, Deadline deadline) override { return store_.get(prefix_ + key, deadline); }

 private:
  Store& store_;
  std::string prefix_;
};

inline std::shared_ptr<Communicator> connect_part(Store& store, const std::string& name, int rank, int size,
                                                  const WaitHooks& hooks) {
  if (size == 1) {
    return std::make_shared<SoloCommunicator>();
  }
  PrefixedStore own(store, name + "/");
  return ShmCommunicator::connect(own, rank, size, soon(), hooks);
}

// Engines of one group fail together, which those of threads do not by themselves: a wait on one of them ends when
// `other` has failed, since a receive that nobody answers has ended there. It lasts longer than the slowest test.
inline WaitHooks failing_with(const std::shared_ptr<Communicator>& other, const WaitHooks& hooks) {
  if (other->size() == 1) {
    return hooks;
  }
  const auto byte = std::make_shared<std::uint8_t>();
  const MemoryView view{byte.get(), 1, DType::kUInt8};
  const std::shared_ptr<Transfer> unanswered =
      other->receive(view, Communicator::kAnySource, ~std::uint64_t{0}, Deadline::after(std::chrono::hours(24)));
  WaitHooks both = hooks;
  both.probe = [probe = hooks.probe, unanswered, byte, other] {
    probe();
    if (unanswered->poll()) {
      unanswered->wait(soon());
    }
  };
  return both;
}

inline std::shared_ptr<Hierarchical> connect_hosts(Store& store, int rank, const std::vector<int>& host_of_rank,
                                                   const WaitHooks& hooks = {}) {
  const HostLayout layout(host_of_rank);
  const int host = layout.host_of(rank);
  Hierarchical::Parts parts;
  parts.inside = connect_part(store, "host" + std::to_string(host), layout.index_within_host(rank),
                              static_cast<int>(layout.ranks_of(host).size()), hooks.among(layout.ranks_of(host)));
  parts.everyone = connect_part(store, "everyone", rank, layout.size(), hooks);
  if (layout.is_on_rail(rank)) {
    const int index = layout.index_within_host(rank);
    parts.rail = connect_part(store, "rail" + std::to_string(index), host, layout.num_hosts(),
                              failing_with(parts.everyone, hooks.among(layout.ranks_of_rail(index))));
  }
  return std::make_shared<Hierarchical>(layout, parts, hooks);
}

// Calls `body` on every rank; rank r is on host host_of_rank[r].
inline void run_hosts(const std::vector<int>& host_of_rank,
                      const std::function<void(Hierarchical& communicator)>& body) {
  run_threads(static_cast<int>(host_of_rank.size()),
              [&](Store& store, int rank) { body(*connect_hosts(store, rank, host_of_rank)); });
}

}  // namespace accelerate_cpp::comm::testing
