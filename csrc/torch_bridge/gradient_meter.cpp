#include "torch_bridge/gradient_meter.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "torch_bridge/bound_gradient.h"
#include "torch_bridge/gradient_scaling.h"

namespace accelerate_cpp::grad {
namespace {

bool measurable(const at::Tensor& gradient) {
  const bool plain = gradient.defined() && gradient.device().is_cpu() && gradient.layout() == at::kStrided &&
                     !gradient.unsafeGetTensorImpl()->is_python_dispatch() && !gradient.requires_grad();
  const at::ScalarType dtype = plain ? gradient.scalar_type() : at::ScalarType::Undefined;
  return (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16) &&
         gradient.is_non_overlapping_and_dense();
}

}  // namespace

std::shared_ptr<GradientMeter> GradientMeter::create(const std::vector<at::Tensor>& parameters) {
  std::shared_ptr<GradientMeter> meter(new GradientMeter(parameters));
  meter->install_hooks();
  return meter;
}

GradientMeter::GradientMeter(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& tensor : parameters) {
    if (tensor.requires_grad() && tensor.is_leaf()) {
      index_of_[tensor.unsafeGetTensorImpl()] = parameters_.size();
      Parameter parameter;
      parameter.tensor = tensor;
      parameters_.push_back(std::move(parameter));
    }
  }
}

void GradientMeter::install_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = weak_from_this(), i](const torch::autograd::variable_list& outputs,
                                     const torch::autograd::variable_list&) {
          if (const std::shared_ptr<GradientMeter> meter = weak.lock()) {
            measure(meter->parameters_[i]);
          }
          return outputs;
        },
        [](torch::autograd::CompiledNodeArgs&) {}));  // compiled autograd measures nothing
  }
}

GradientMeter::~GradientMeter() {
  forget_source();
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator) {
      parameter.accumulator->del_post_hook(parameter.hook);
    }
  }
}

void GradientMeter::measure(Parameter& parameter) {
  if (parameter.passes_to_measure == 0) {
    return;
  }
  --parameter.passes_to_measure;
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!measurable(gradient)) {
    return;
  }
  if (seen_by_python(gradient)) {
    gradient = unseen(gradient);
  }
  parameter.statistics = amp::measure_gradients({gradient})[0];
  parameter.gradient = gradient.getIntrusivePtr();
  parameter.version = gradient._version();
}

std::optional<amp::GradientStatistics> GradientMeter::statistics(const at::Tensor& tensor) {
  const auto found = index_of_.find(tensor.unsafeGetTensorImpl());
  if (found == index_of_.end()) {
    return std::nullopt;
  }
  Parameter& parameter = parameters_[found->second];
  parameter.passes_to_measure = kPassesToMeasure;
  const at::Tensor& gradient = tensor.grad();
  const bool untouched = gradient.defined() &&
                         gradient.unsafeGetTensorImpl() == parameter.gradient._unsafe_get_target() &&
                         !parameter.gradient.expired() && gradient._version() == parameter.version &&
                         gradient.storage().use_count() == 1 && !seen_by_python(gradient);
  return untouched ? std::optional(parameter.statistics) : std::nullopt;
}

}  // namespace accelerate_cpp::grad
