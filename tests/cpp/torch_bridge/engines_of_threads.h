// Runs C10dEngines in ranks that are threads.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/ranks.h"
#include "torch_bridge/c10d_engine.h"
#include "torch_bridge/thread_engine.h"

namespace accelerate_cpp::comm::testing {

// What the engines of one test share.
class Network {
 public:
  // `engine_name`: "gloo" for engines that behave like it.
  explicit Network(std::string engine_name) : engine_name_(std::move(engine_name)) {}

  std::shared_ptr<C10dEngine> connect(int rank, int size, const WaitHooks& hooks = {},
                                      const std::string& name = "everyone") {
    const auto make = [this](const C10dEngine::StorePointer& own_store, int own_rank, int own_size) {
      if (own_rank == 0) {
        const std::string wire = std::to_string(add_wire());
        own_store->set("wire", std::vector<std::uint8_t>(wire.begin(), wire.end()));
      }
      const std::vector<std::uint8_t> wire = own_store->get("wire");
      return c10::make_intrusive<ThreadEngine>(wires()[std::stoul(std::string(wire.begin(), wire.end()))], own_rank,
                                               own_size, engine_name_);
    };
    return std::make_shared<C10dEngine>(make, store, C10dEngine::Place{name, rank, size}, hooks);
  }

  // In the order in which groups were connected.
  std::vector<std::shared_ptr<Wire>> wires() {
    const std::lock_guard lock(mutex_);
    return wires_;
  }

  const C10dEngine::StorePointer store = c10::make_intrusive<::c10d::HashStore>();

 private:
  std::size_t add_wire() {
    const std::lock_guard lock(mutex_);
    wires_.push_back(std::make_shared<Wire>());
    return wires_.size() - 1;
  }

  const std::string engine_name_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Wire>> wires_;
};

// Calls `body` on every rank of a group that is connected over `network`.
inline void run_engines(Network& network, int size,
                        const std::function<void(const std::shared_ptr<C10dEngine>& engine)>& body,
                        const WaitHooks& hooks = {}) {
  run_threads(size, [&](Store&, int rank) { body(network.connect(rank, size, hooks)); });
}

}  // namespace accelerate_cpp::comm::testing
