// The gradient exchange that suits a communicator.
#pragma once

#include <memory>
#include <vector>

#include "core/base/deadline.h"
#include "core/comm/communicator.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::grad {

// Buckets for gradients, averaged over the ranks of `communicator`, which must outlive them: in shared memory where the
// ranks have it in common, else through all_reduce. Collective: every rank passes the same buckets.
std::unique_ptr<GradientExchange> make_gradient_exchange(comm::Communicator& communicator,
                                                         const std::vector<BucketSpec>& buckets, Deadline deadline);

}  // namespace accelerate_cpp::grad
