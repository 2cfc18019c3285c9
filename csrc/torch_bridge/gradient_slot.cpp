#include "torch_bridge/gradient_slot.h"

#include <ATen/ops/empty_like.h>

#include <utility>

#include "core/base/error.h"
#include "core/comm/copy.h"
#include "torch_bridge/pass_checks.h"

namespace accelerate_cpp::grad {

GradientSlot::State GradientSlot::state() const {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined()) {
    return State::kEmpty;
  }
  if (!bound_.is(grad)) {
    return State::kForeign;
  }
  return averaged_ ? State::kAveraged : State::kOwn;
}

void GradientSlot::place(at::Tensor memory) {
  const bool bound = bound_.is(parameter_.grad());
  if (bound) {
    memory.copy_(memory_);
  }
  memory_ = std::move(memory);
  bound_ = BoundGradient(memory_);
  if (bound) {
    parameter_.mutable_grad() = bound_.tensor();
  }
}

void GradientSlot::leave_place() {
  memory_.reset();
  bound_ = {};
}

// ATen's general copy takes longer to set up than to copy a small gradient.
void GradientSlot::copy_in(const at::Tensor& gradient) const {
  const bool same_layout = gradient.scalar_type() == memory_.scalar_type() && gradient.strides() == memory_.strides() &&
                           memory_.is_non_overlapping_and_dense() && gradient.device().is_cpu() &&
                           !gradient.is_conj() && !gradient.is_neg();
  if (same_layout) {
    comm::copy(memory_.data_ptr(), gradient.data_ptr(), memory_.nbytes(), comm::Residency::kCached);
  } else {
    memory_.copy_(gradient);
  }
}

void GradientSlot::take_gradient() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) {
    return;
  }
  if (grad.layout() != at::kStrided) {
    throw InvalidArgument("parameter " + name_ +
                          " received a sparse gradient, which only embeddings built with sparse=True before the model "
                          "was prepared may have; build it so, or make the gradient dense");
  }
  check_no_graph(grad);
  if (!bound_.is(grad)) {
    copy_in(grad);
    grad = bound_.tensor();
    averaged_ = false;
  }
}

bool GradientSlot::prepare_for_sum(std::optional<double> weight) {
  take_gradient();
  switch (state()) {
    case State::kEmpty:
      memory_.zero_();
      return false;
    case State::kAveraged:
      if (weighed_ && weight) {
        memory_.mul_(*weight);
      }
      return true;
    default:
      return true;
  }
}

void GradientSlot::take_average(std::optional<Measurement> measurement, bool is_weighed) {
  if (measurement || bound_.has_measurement()) {
    bound_ = BoundGradient(memory_, std::move(measurement));
  }
  parameter_.mutable_grad() = bound_.tensor();
  averaged_ = true;
  weighed_ = is_weighed;
}

void GradientSlot::prepare_without_gradient() {
  if (bound_.is(parameter_.grad())) {
    parameter_.mutable_grad().reset();
  }
  memory_.zero_();
}

std::optional<Measurement> GradientSlot::believed() const {
  return bound_.is(parameter_.grad()) ? bound_.statistics() : std::nullopt;
}

at::Tensor GradientSlot::gradient_in_order() const {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined() || grad.layout() != at::kStrided || grad.scalar_type() != memory_.scalar_type()) {
    return {};
  }
  const bool in_order = grad.strides() == memory_.strides() && !grad.is_conj() && !grad.is_neg();
  return in_order ? grad : at::empty_like(memory_).copy_(grad);
}

}  // namespace accelerate_cpp::grad
