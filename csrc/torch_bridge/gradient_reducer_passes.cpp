// GradientReducer during backward passes.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "core/comm/copy.h"
#include "torch_bridge/gradient_reducer.h"
#include "torch_bridge/sparse_gradient.h"

namespace accelerate_cpp::grad {

// Lives as long as autograd knows of a pass whose end the caller does not tell.
class GradientReducer::Pass {
 public:
  explicit Pass(std::weak_ptr<GradientReducer> reducer) : reducer_(std::move(reducer)) {}
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  ~Pass() {
    const std::shared_ptr<GradientReducer> reducer = reducer_.lock();
    if (reducer && !ended_) {
      reducer->pass_failed();
    }
  }

  // Called by autograd when all gradients are there.
  void end() {
    if (const std::shared_ptr<GradientReducer> reducer = reducer_.lock()) {
      try {
        reducer->end_backward();
      } catch (...) {
        reducer->rethrow_();
      }
    }
    ended_ = true;
  }

 private:
  const std::weak_ptr<GradientReducer> reducer_;
  bool ended_ = false;
};

void GradientReducer::on_gradient(std::size_t index) {
  Parameter& parameter = parameters_[index];
  if (!averages(parameter)) {
    return;
  }
  try {
    check_process();
    begin_backward();
    if (parameter.arrived) {
      throw InvalidArgument(
          "parameter " + parameter.given.name +
          " received two gradients in one backward pass, after the first had been handed to the other ranks. "
          "Reentrant checkpointing does this when a module is called twice: use torch.utils.checkpoint with "
          "use_reentrant=False");
    }
    parameter.arrived = true;
    if (parameter.given.sparse_gradient) {
      return;
    }
    bind(parameter);
    if (!order_learnt_) {
      arrival_.push_back(index);
    }
    const std::size_t bucket = plan_.slots[index].bucket;
    if (--missing_[bucket] == 0) {
      publish(bucket);
      exchange_->progress();
    }
  } catch (...) {
    rethrow_();
  }
}

void GradientReducer::begin_backward() {
  const int current = torch::autograd::get_current_graph_task_id();
  if (in_backward_) {
    if (!caller_tells_ && graph_task_ != current) {
      throw InvalidArgument(
          "a gradient arrived from another backward pass than the one in progress. Reentrant checkpointing does this: "
          "call accelerator.backward(loss) instead of loss.backward(), or use torch.utils.checkpoint with "
          "use_reentrant=False");
    }
    return;
  }
  in_backward_ = true;
  graph_task_ = current;
  forget_arrivals();
  if (!caller_tells_) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [pass = std::make_shared<Pass>(weak_from_this())] { pass->end(); });
  }
  begin_round({std::exchange(weight_, std::nullopt), passes_to_measure_ > 0});
  passes_to_measure_ -= passes_to_measure_ > 0 ? 1 : 0;
  missing_.clear();
  for (const BucketLayout& bucket : plan_.buckets) {
    missing_.push_back(0);
    for (const std::size_t parameter : bucket.parameters) {
      missing_.back() += parameters_[parameter].accumulator ? 1 : 0;
    }
  }
  published_.assign(plan_.buckets.size(), false);
}

void GradientReducer::begin_round(const comm::RoundOptions& options) {
  if (!caller_tells_) {
    interruptions_ = communicator_->interruptions();
  }
  if (!why_group_ended_.empty()) {
    throw PeerLost("the process group that sums gradients ended with a backward pass that failed (" + why_group_ended_ +
                   "); the next forward pass of the model, on all ranks, makes another one");
  }
  if (!next_order_.empty()) {
    build(next_order_);
    next_order_.clear();  // unless that failed; then it is done before the next pass
  }
  exchange_->begin(options, deadline());
}

// Not by ATen's general copy, whose preparations take longer than copying a small gradient.
void GradientReducer::fill_slot(const at::Tensor& slot, const at::Tensor& grad) {
  const bool same_layout = grad.scalar_type() == slot.scalar_type() && grad.strides() == slot.strides() &&
                           slot.is_non_overlapping_and_dense() && grad.device().is_cpu() && !grad.is_conj() &&
                           !grad.is_neg();
  if (same_layout) {
    comm::copy(slot.data_ptr(), grad.data_ptr(), slot.nbytes(), comm::Residency::kCached);
  } else {
    slot.copy_(grad);
  }
}

bool GradientReducer::bind(Parameter& parameter) {
  at::Tensor& grad = parameter.given.tensor.mutable_grad();
  if (!grad.defined()) {
    return false;
  }
  if (grad.layout() != at::kStrided) {
    throw InvalidArgument("parameter " + parameter.given.name +
                          " received a sparse gradient, which only embeddings built with sparse=True before the model "
                          "was prepared may have; build it so, or make the gradient dense");
  }
  if (grad.requires_grad()) {
    throw InvalidArgument(
        "backward(create_graph=True) through a synchronised model is not available: the averaged gradient has no "
        "graph. Use torch.autograd.grad, or no_sync()");
  }
  if (!parameter.bound.is(grad)) {
    fill_slot(parameter.slot, grad);
    grad = parameter.bound.tensor();
  }
  return true;
}

void GradientReducer::publish(std::size_t bucket) {
  const BucketLayout& layout = plan_.buckets[bucket];
  std::uint8_t* const used = exchange_->used_slots(bucket);
  for (std::size_t s = 0; s < layout.parameters.size(); ++s) {
    Parameter& parameter = parameters_[layout.parameters[s]];
    used[s] = parameter.arrived || (parameter.accumulator && bind(parameter)) ? 1 : 0;
    if (used[s] == 0) {
      parameter.slot.zero_();
    }
  }
  exchange_->publish(bucket);
  published_[bucket] = true;
}

void GradientReducer::end_backward() {
  for (std::size_t bucket = 0; bucket < published_.size(); ++bucket) {
    if (!published_[bucket]) {
      publish(bucket);
    }
  }
  exchange_->finish(deadline());
  take_averages();
  average_sparse_gradients(true);
  in_backward_ = false;
  if (!order_learnt_) {
    learn_order();
  }
}

void GradientReducer::take_averages() {
  for (std::size_t i = 0; i < num_dense_; ++i) {
    Parameter& parameter = parameters_[i];
    const Slot& slot = plan_.slots[i];
    at::Tensor& grad = parameter.given.tensor.mutable_grad();
    if (!parameter.accumulator || (!grad.defined() && !exchange_->used_anywhere(slot.bucket, slot.index))) {
      continue;
    }
    if (auto measurement = measured(slot)) {
      parameter.bound = BoundGradient(parameter.slot, std::move(measurement));
    }
    grad = parameter.bound.tensor();
  }
}

std::optional<Measurement> GradientReducer::measured(const Slot& slot) const {
  if (device_exchange_ != nullptr) {
    return device_exchange_->device_statistics(slot.bucket, slot.index);
  }
  return exchange_->statistics(slot.bucket, slot.index);
}

void GradientReducer::average_sparse_gradients(bool with_own) {
  for (std::size_t i = num_dense_; i < parameters_.size(); ++i) {
    const ReducedParameter& given = parameters_[i].given;
    if (!parameters_[i].accumulator) {
      continue;
    }
    at::Tensor own;
    at::Tensor& grad = with_own ? given.tensor.mutable_grad() : own;
    if (grad.defined() && !grad.is_sparse()) {
      throw InvalidArgument("parameter " + given.name +
                            " of an embedding with sparse=True received a dense gradient, because something else uses "
                            "it, too; build the embedding with sparse=False");
    }
    grad = average_sparse(*communicator_, given.tensor, grad, exchange_->divisor(), deadline());
  }
}

void GradientReducer::forget_arrivals() {
  arrival_.clear();
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
  }
}

void GradientReducer::expect_backward() {
  caller_tells_ = true;
  interruptions_ = communicator_->interruptions();
}

void GradientReducer::backward_ended() {
  if (in_backward_) {
    end_backward();
  }
  caller_tells_ = false;
}

void GradientReducer::backward_failed(const std::string& reason) noexcept {
  in_backward_ = caller_tells_ = false;
  if (synchronizing_) {
    give_up_pass(reason);
  }
}

void GradientReducer::pass_failed() noexcept {
  in_backward_ = false;
  give_up_pass("its backward pass ended in an exception");
}

void GradientReducer::give_up_pass(const std::string& reason) noexcept {
  // What they share memory with is for the next pass, and peers may still write into it. Without any, a step taken by
  // mistake changes nothing.
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator) {
      parameter.given.tensor.mutable_grad().reset();
    }
  }
  const bool others_may_complete = device_exchange_ != nullptr && device_exchange_->completing();
  if (end_hooks_collectives_ || others_may_complete) {
    communicator_->abort(reason);
  } else {
    tell_other_ranks(reason);
  }
  if (end_hooks_collectives_) {
    end(end_hooks_collectives_);
  } else if (options_.device_group && why_group_ended_.empty()) {
    why_group_ended_ = reason;
    end(options_.device_group->abort);
  }
}

void GradientReducer::tell_other_ranks(const std::string& reason) noexcept {
  if (communicator_->interruptions() != interruptions_) {
    return;  // they have raised as well
  }
  try {
    communicator_->withdraw(reason, deadline());
  } catch (...) {
    communicator_->abort(reason);
  }
}

void GradientReducer::end(const std::function<void()>& collectives) noexcept {
  try {
    collectives();
  } catch (const std::exception& error) {
    TORCH_WARN("the process group of a failed backward pass could not be ended: ", error.what());
  }
}

void GradientReducer::take_part_without_gradients() {
  check_process();
  begin_round({0.0, passes_to_measure_ > 0});
  for (std::size_t i = 0; i < num_dense_; ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.bound.is(parameter.given.tensor.grad())) {
      parameter.given.tensor.mutable_grad().reset();
    }
    parameter.slot.zero_();
  }
  for (std::size_t bucket = 0; bucket < plan_.buckets.size(); ++bucket) {
    std::fill_n(exchange_->used_slots(bucket), plan_.buckets[bucket].parameters.size(), std::uint8_t{0});
    exchange_->publish(bucket);
  }
  exchange_->finish(deadline());
  average_sparse_gradients(false);
  if (!order_learnt_) {
    forget_arrivals();
    learn_order();
  }
}

}  // namespace accelerate_cpp::grad
