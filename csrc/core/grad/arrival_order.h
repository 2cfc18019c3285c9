// The order in which gradients arrive, learnt in one backward pass. All ranks use that of rank 0.
#pragma once

#include <cstddef>
#include <vector>

#include "core/base/deadline.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::grad {

class ArrivalOrder {
 public:
  explicit ArrivalOrder(std::size_t num_parameters) : num_parameters_(num_parameters) {}

  bool is_learnt() const { return learnt_; }

  // Forgets what has arrived in a pass that was not completed.
  void begin_pass() { arrived_.clear(); }

  // Each parameter arrives at most once in a pass.
  void note(std::size_t parameter) { arrived_.push_back(parameter); }

  // Collective, after the pass: the parameters that arrived on rank 0, then the others, by their numbers.
  std::vector<std::size_t> learn(comm::Communicator& communicator, Deadline deadline);

 private:
  std::size_t num_parameters_;
  std::vector<std::size_t> arrived_;  // in this pass
  bool learnt_ = false;
};

}  // namespace accelerate_cpp::grad
