// Backends over shared memory whose ranks are threads of one test.
#pragma once

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>

#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"
#include "torch_bridge/c10d_backend.h"

namespace accelerate_cpp::comm::testing {

inline constexpr std::chrono::milliseconds kTimeout(120000);

// Calls `body` on every rank of a group of `size` threads.
inline void run_backends(int size, const std::function<void(C10dBackend& backend, int rank)>& body,
                         const BackendHooks& hooks = {}) {
  run_threads(size, [&](Store& store, int rank) {
    auto communicator = ShmCommunicator::connect(store, rank, size, soon(), {});
    const auto backend = c10::make_intrusive<C10dBackend>(std::move(communicator), "shm", kTimeout, hooks);
    body(*backend, rank);
  });
}

inline c10::intrusive_ptr<C10dBackend> alone(const BackendHooks& hooks = {}) {
  return c10::make_intrusive<C10dBackend>(std::make_shared<SoloCommunicator>(), "shm", kTimeout, hooks);
}

inline at::Tensor filled(double value, at::IntArrayRef sizes = {4}, at::ScalarType dtype = at::kFloat) {
  return at::full(sizes, value, dtype);
}

inline void expect_equal(const at::Tensor& found, const at::Tensor& expected) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_TRUE(at::equal(found, expected))
      << "found " << found.toString() << " starting with " << found.flatten()[0].item<double>() << ", expected "
      << expected.flatten()[0].item<double>();
}

// The options of a call that is to return before it is done, or is not.
template <class Options>
Options options(bool asynchronous, int root = 0) {
  Options made;
  made.asyncOp = asynchronous;
  if constexpr (requires { made.rootRank; }) {
    made.rootRank = root;
  }
  return made;
}

}  // namespace accelerate_cpp::comm::testing
