#include "core/grad/make_gradient_exchange.h"

#include "core/comm/call_signature.h"
#include "core/comm/ordered.h"
#include "core/comm/solo.h"
#include "core/grad/reduced_gradient_exchange.h"
#include "core/grad/solo_gradient_exchange.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shm_communicator.h"
#include "core/grad/shm_gradient_exchange.h"
#endif

namespace accelerate_cpp::grad {

std::unique_ptr<GradientExchange> make_gradient_exchange(comm::Communicator& communicator,
                                                         const std::vector<BucketSpec>& buckets, Deadline deadline) {
  if (auto* const ordered = dynamic_cast<comm::OrderedCommunicator*>(&communicator)) {
    std::unique_ptr<GradientExchange> exchange = make_gradient_exchange(ordered->in_turn(), buckets, deadline);
    exchange->set_queue(ordered->queue());
    return exchange;
  }
  if (auto* const solo = dynamic_cast<comm::SoloCommunicator*>(&communicator)) {
    solo->check_usable(comm::name(comm::CallKind::kGradients));
    return std::make_unique<SoloGradientExchange>(buckets);
  }
#if defined(ACCELERATE_HAS_SHM)
  if (auto* const shm = dynamic_cast<comm::ShmCommunicator*>(&communicator)) {
    return std::make_unique<ShmGradientExchange>(*shm, buckets, deadline);
  }
#endif
  return std::make_unique<ReducedGradientExchange>(communicator, buckets);
}

}  // namespace accelerate_cpp::grad
