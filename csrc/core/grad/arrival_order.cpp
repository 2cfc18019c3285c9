#include "core/grad/arrival_order.h"

#include <cstdint>

namespace accelerate_cpp::grad {

std::vector<std::size_t> ArrivalOrder::learn(comm::Communicator& communicator, Deadline deadline) {
  std::vector<std::int64_t> order(arrived_.begin(), arrived_.end());
  std::vector<bool> seen(num_parameters_, false);
  for (const std::size_t parameter : arrived_) {
    seen[parameter] = true;
  }
  for (std::size_t i = 0; i < num_parameters_; ++i) {
    if (!seen[i]) {
      order.push_back(static_cast<std::int64_t>(i));
    }
  }
  communicator.broadcast({order.data(), order.size(), DType::kInt64}, 0, deadline);
  learnt_ = true;
  return {order.begin(), order.end()};
}

}  // namespace accelerate_cpp::grad
