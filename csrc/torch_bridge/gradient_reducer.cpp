#include "torch_bridge/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/base/check.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

using torch::autograd::variable_list;

std::shared_ptr<GradientReducer> GradientReducer::create(std::shared_ptr<comm::Communicator> communicator,
                                                         std::vector<at::Tensor> parameters, ReducerOptions options,
                                                         Rethrow rethrow) {
  std::shared_ptr<GradientReducer> reducer(
      new GradientReducer(std::move(communicator), std::move(parameters), options, std::move(rethrow)));
  reducer->install_hooks();
  return reducer;
}

GradientReducer::GradientReducer(std::shared_ptr<comm::Communicator> communicator, std::vector<at::Tensor> parameters,
                                 ReducerOptions options, Rethrow rethrow)
    : communicator_(std::move(communicator)), options_(options), rethrow_(std::move(rethrow)) {
  if (parameters.empty()) {
    throw InvalidArgument("the model has no parameter that requires a gradient; there is nothing to synchronise");
  }
  for (at::Tensor& tensor : parameters) {
    if (!tensor.is_leaf() || !tensor.requires_grad() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      throw InvalidArgument("expected dense CPU leaf tensors that require gradients; found one on " +
                            tensor.device().str());
    }
    Parameter parameter;
    parameter.tensor = std::move(tensor);
    parameters_.push_back(std::move(parameter));
  }
  // Gradients tend to arrive in the reverse of the order in which parameters are registered.
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build(order);
}

void GradientReducer::install_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = weak_from_this(), i](const variable_list& outputs, const variable_list&) {
          if (const std::shared_ptr<GradientReducer> reducer = weak.lock()) {
            reducer->on_gradient(i);
          }
          return outputs;
        },
        // Compiled autograd traces hooks; ours has nothing to trace and runs as it is.
        [](torch::autograd::CompiledNodeArgs&) {}));
  }
}

GradientReducer::~GradientReducer() {
  for (Parameter& parameter : parameters_) {
    if (parameter.accumulator) {
      parameter.accumulator->del_post_hook(parameter.hook);
    }
  }
}

void GradientReducer::check_process() const {
  if (fork_generation() != fork_generation_) {
    throw InvalidArgument(
        "this process was forked off after the model was prepared, and shares the memory of its gradients with the "
        "process that prepared it. Use the model under torch.no_grad() here, or a copy.deepcopy() of the module that "
        "was prepared");
  }
}

void GradientReducer::set_synchronizing(bool synchronizing) {
  check_process();
  synchronizing_ = synchronizing;
}

void GradientReducer::build(const std::vector<std::size_t>& order) {
  std::vector<ParameterSpec> specs;
  for (const Parameter& parameter : parameters_) {
    specs.push_back({dtype_of(parameter.tensor), static_cast<std::size_t>(parameter.tensor.numel())});
  }
  plan_ = plan_buckets(specs, order, options_.first_bucket_cap_bytes, options_.bucket_cap_bytes);
  std::vector<comm::BucketSpec> buckets;
  for (const BucketLayout& layout : plan_.buckets) {
    buckets.push_back({layout.dtype, layout.count, layout.parameters.size()});
  }
  exchange_ = communicator_->gradient_exchange(buckets, deadline());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& tensor = parameter.tensor;
    const Slot& slot = plan_.slots[i];
    const MemoryView bucket = exchange_->bucket(slot.bucket);
    void* const data = bucket.bytes() + slot.offset * element_size(bucket.dtype);
    // As torch has it, a gradient has the strides of its parameter where these fill memory, else it is contiguous. The
    // tensor keeps the exchange alive: .grad may outlive this reducer.
    const auto keep = [exchange = exchange_](void*) {};
    at::Tensor fresh = tensor.is_non_overlapping_and_dense()
                           ? at::from_blob(data, tensor.sizes(), tensor.strides(), keep, tensor.options())
                           : at::from_blob(data, tensor.sizes(), keep, tensor.options());
    const bool bound = parameter.slot.defined() && tensor.grad().defined() && tensor.grad().is_same(parameter.slot);
    if (bound) {
      fresh.copy_(parameter.slot);
      tensor.mutable_grad() = fresh;
    }
    parameter.slot = std::move(fresh);
  }
}

void GradientReducer::on_gradient(std::size_t index) {
  if (!synchronizing_) {
    return;
  }
  try {
    check_process();
    begin_backward();
    Parameter& parameter = parameters_[index];
    if (parameter.arrived) {
      throw InvalidArgument(
          "a parameter received two gradients in one backward pass, after the first had been handed to the other "
          "ranks. "
          "Reentrant checkpointing does this: use torch.utils.checkpoint with use_reentrant=False");
    }
    bind(parameter);
    parameter.arrived = true;
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
    if (graph_task_ != current) {
      throw InvalidArgument(
          "a gradient arrived from another backward pass than the one in progress. Either an earlier backward() "
          "through "
          "this model ended in an exception, and training must restart from a checkpoint; or reentrant checkpointing "
          "is "
          "in use: pass use_reentrant=False to torch.utils.checkpoint");
    }
    return;
  }
  in_backward_ = true;
  graph_task_ = current;
  arrival_.clear();
  missing_.clear();
  for (const BucketLayout& bucket : plan_.buckets) {
    missing_.push_back(bucket.parameters.size());
  }
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const std::shared_ptr<GradientReducer> reducer = weak.lock()) {
      try {
        reducer->end_backward();
      } catch (...) {
        reducer->rethrow_();
      }
    }
  });
}

bool GradientReducer::bind(Parameter& parameter) {
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined()) {
    return false;
  }
  if (grad.layout() != at::kStrided) {
    throw InvalidArgument(
        "sparse gradients are not averaged over shared memory; build the embedding with sparse=False");
  }
  if (grad.requires_grad()) {
    throw InvalidArgument(
        "backward(create_graph=True) through a synchronised model is not available: the averaged gradient has no "
        "graph. "
        "Use torch.autograd.grad, or no_sync()");
  }
  if (!grad.is_same(parameter.slot)) {
    parameter.slot.copy_(grad);
    grad = parameter.slot;
  }
  return true;
}

void GradientReducer::publish(std::size_t bucket) {
  const BucketLayout& layout = plan_.buckets[bucket];
  std::uint8_t* const used = exchange_->used_slots(bucket);
  for (std::size_t s = 0; s < layout.parameters.size(); ++s) {
    Parameter& parameter = parameters_[layout.parameters[s]];
    used[s] = parameter.arrived || bind(parameter) ? 1 : 0;
    if (used[s] == 0) {
      parameter.slot.zero_();
    }
  }
  exchange_->publish(bucket);
}

void GradientReducer::end_backward() {
  for (std::size_t bucket = 0; bucket < missing_.size(); ++bucket) {
    if (missing_[bucket] > 0) {
      publish(bucket);
    }
  }
  exchange_->finish(deadline());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (!parameter.tensor.grad().defined() && exchange_->used_anywhere(plan_.slots[i].bucket, plan_.slots[i].index)) {
      parameter.tensor.mutable_grad() = parameter.slot;
    }
  }
  in_backward_ = false;
  if (!order_learnt_) {
    follow_arrival_order();
  }
}

void GradientReducer::follow_arrival_order() {
  std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].arrived) {
      order.push_back(static_cast<std::int64_t>(i));
    }
  }
  communicator_->broadcast({order.data(), order.size(), DType::kInt64}, 0, deadline());
  order_learnt_ = true;
  std::vector<std::size_t> current;
  for (const BucketLayout& bucket : plan_.buckets) {
    current.insert(current.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  const std::vector<std::size_t> learnt(order.begin(), order.end());
  if (learnt != current) {
    build(learnt);
  }
}

void GradientReducer::abort(const std::string& reason) noexcept {
  if (synchronizing_) {
    communicator_->abort(reason);
  }
}

std::vector<std::size_t> GradientReducer::bucket_sizes_bytes() const {
  std::vector<std::size_t> sizes;
  for (const BucketLayout& bucket : plan_.buckets) {
    sizes.push_back(bucket.count * element_size(bucket.dtype));
  }
  return sizes;
}

}  // namespace accelerate_cpp::grad
