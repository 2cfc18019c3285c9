// Reducers of threads that are the ranks of a group over shared memory, for tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "torch_bridge/gradient_reducer.h"

namespace accelerate_cpp::grad::testing {

using Communicator = std::shared_ptr<comm::Communicator>;

inline const ReducerOptions kOptions{1 << 20, 1 << 20, std::chrono::milliseconds(120000), {}};

template <class Body>
void run_ranks(int size, const Body& body) {
  comm::testing::run_threads(size, [&](comm::Store& store, int rank) {
    body(Communicator(comm::ShmCommunicator::connect(store, rank, size, comm::testing::soon(), {})), rank);
  });
}

inline std::shared_ptr<GradientReducer> reducer_of_named(Communicator communicator,
                                                         std::vector<ReducedParameter> parameters,
                                                         ReducerOptions options = kOptions) {
  return GradientReducer::create(std::move(communicator), std::move(parameters), {}, options, [] { throw; });
}

// Named "p0", "p1", ...
inline std::shared_ptr<GradientReducer> reducer_of(Communicator communicator, const std::vector<at::Tensor>& tensors,
                                                   ReducerOptions options = kOptions) {
  std::vector<ReducedParameter> parameters;
  for (const at::Tensor& tensor : tensors) {
    parameters.push_back({"p" + std::to_string(parameters.size()), tensor});
  }
  return reducer_of_named(std::move(communicator), std::move(parameters), options);
}

}  // namespace accelerate_cpp::grad::testing
