#include "torch_bridge/pass_checks.h"

#include "core/base/error.h"

namespace accelerate_cpp::grad {

void check_not_forked(const OwnerProcess& process) {
  if (process.forked()) {
    throw InvalidArgument(
        "this process was forked off after the model was prepared, and shares the memory of its gradients with the "
        "process that prepared it. Use the model under torch.no_grad() here, or a copy.deepcopy() of the module that "
        "was prepared");
  }
}

void check_no_graph(const at::Tensor& gradient) {
  if (gradient.requires_grad()) {
    throw InvalidArgument(
        "backward(create_graph=True) through a synchronised model is not available: the averaged gradient has no "
        "graph. Use torch.autograd.grad, or no_sync()");
  }
}

void throw_second_gradient(const std::string& parameter) {
  throw InvalidArgument(
      "parameter " + parameter +
      " received two gradients in one backward pass, after the first had been handed to the other ranks. Reentrant "
      "checkpointing does this when a module is called twice: use torch.utils.checkpoint with use_reentrant=False");
}

void throw_other_pass() {
  throw InvalidArgument(
      "a gradient arrived from another backward pass than the one in progress. Reentrant checkpointing does this: call "
      "accelerator.backward(loss) instead of loss.backward(), or use torch.utils.checkpoint with use_reentrant=False");
}

}  // namespace accelerate_cpp::grad
