#include "torch_bridge/pass_failure.h"

#include <c10/util/Exception.h>

#include "core/base/error.h"

namespace accelerate_cpp::grad {

void PassFailure::check_group() const {
  if (!why_group_ended_.empty()) {
    throw PeerLost("the process group that sums gradients ended with a backward pass that failed (" + why_group_ended_ +
                   "); the next forward pass of the model, on all ranks, makes another one");
  }
}

void PassFailure::tell(const std::string& reason, bool others_may_complete, Deadline deadline) noexcept {
  if (end_hook_ || others_may_complete) {
    communicator_->abort(reason);
  } else {
    withdraw(reason, deadline);
  }
  if (end_hook_) {
    end(end_hook_);
  } else if (end_device_group_ && why_group_ended_.empty()) {
    why_group_ended_ = reason;
    end(end_device_group_);
  }
}

void PassFailure::withdraw(const std::string& reason, Deadline deadline) noexcept {
  if (communicator_->interruptions() != interruptions_) {
    return;  // they have raised as well
  }
  try {
    communicator_->withdraw(reason, deadline);
  } catch (...) {
    communicator_->abort(reason);
  }
}

void PassFailure::end(const End& collectives) noexcept {
  try {
    collectives();
  } catch (const std::exception& error) {
    TORCH_WARN("the process group of a failed backward pass could not be ended: ", error.what());
  }
}

}  // namespace accelerate_cpp::grad
