// Exchanges of gradients over shared memory among threads, for tests.
#pragma once

#include <memory>
#include <vector>

#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/grad/make_gradient_exchange.h"

namespace accelerate_cpp::comm::testing {

inline constexpr DType kFloat = DType::kFloat32;
using Buckets = std::vector<grad::BucketSpec>;
using Exchange = std::unique_ptr<grad::GradientExchange>;

template <class Body>
void run_ranks(int size, const Body& body) {
  run_threads(size, [&](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, size, soon(), {});
    body(*communicator);
  });
}

// The elements of a bucket of floats.
inline float* floats(grad::GradientExchange& exchange, std::size_t bucket) {
  return static_cast<float*>(exchange.bucket(bucket).data);
}

}  // namespace accelerate_cpp::comm::testing
