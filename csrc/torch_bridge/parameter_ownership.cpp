#include "torch_bridge/parameter_ownership.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::grad {

using torch::autograd::variable_list;

ParameterOwnership::ParameterOwnership(std::vector<at::Tensor> parameters, Arrived arrived)
    : arrived_(std::move(arrived)) {
  for (at::Tensor& tensor : parameters) {
    index_of_[tensor.unsafeGetTensorImpl()] = parameters_.size();
    parameters_.push_back({std::move(tensor), {}, 0, {}});
  }
}

ParameterOwnership::~ParameterOwnership() {
  for (Parameter& parameter : parameters_) {
    remove_hook(parameter);
  }
}

void ParameterOwnership::install_hook(std::size_t index) {
  Parameter& parameter = parameters_[index];
  // A tensor keeps its accumulator while it requires no gradient.
  const at::Tensor& tensor = parameter.tensor;
  const bool requires_grad = tensor.requires_grad();
  tensor.set_requires_grad(true);
  parameter.accumulator = torch::autograd::impl::grad_accumulator(tensor);
  tensor.set_requires_grad(requires_grad);
  parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [weak = weak_from_this(), index](const variable_list& outputs, const variable_list& gradients) {
        if (const std::shared_ptr<ParameterOwnership> self = weak.lock()) {
          const bool given = !gradients.empty() && gradients.front().defined();
          self->arrived_(index, given && self->parameters_[index].tensor.requires_grad());
        }
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs&) {
        throw InvalidArgument(
            "compiled autograd would leave out the averaging of gradients over the processes; compile the model "
            "without torch._dynamo.config.compiled_autograd");
      }));
}

void ParameterOwnership::remove_hook(Parameter& parameter) {
  if (parameter.accumulator) {
    parameter.accumulator->del_post_hook(parameter.hook);
    parameter.accumulator.reset();
  }
}

void ParameterOwnership::take_free() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!owns(i) && parameters_[i].newer.expired()) {
      install_hook(i);
    }
  }
}

void ParameterOwnership::give_up(ParameterOwnership& newer) {
  bool shares = false;
  for (const auto& [tensor, index] : newer.index_of_) {
    const auto found = index_of_.find(tensor);
    if (found != index_of_.end()) {
      remove_hook(parameters_[found->second]);
      parameters_[found->second].newer = newer.weak_from_this();
      shares = true;
    }
  }
  if (shares) {
    newer.older_.push_back(weak_from_this());
  }
}

std::optional<std::size_t> ParameterOwnership::find(const at::Tensor& tensor) const {
  const auto found = index_of_.find(tensor.unsafeGetTensorImpl());
  return found == index_of_.end() ? std::nullopt : std::optional(found->second);
}

bool ParameterOwnership::averages(std::size_t parameter) const {
  return synchronizing_ || std::any_of(older_.begin(), older_.end(), [&](const auto& one) {
           const std::shared_ptr<const ParameterOwnership> older = one.lock();
           return older != nullptr && older->synchronizing_ && older->find(parameters_[parameter].tensor).has_value();
         });
}

}  // namespace accelerate_cpp::grad
