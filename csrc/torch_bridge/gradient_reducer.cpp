#include "torch_bridge/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "torch_bridge/sparse_gradient.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

using torch::autograd::variable_list;

namespace {

// Loops that clip ask for statistics in every step.
constexpr int kPassesToMeasure = 8;

// Those of this process.
class Reducers {
 public:
  void add(const std::shared_ptr<GradientReducer>& reducer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const std::weak_ptr<GradientReducer>& one) { return one.expired(); });
    all_.push_back(reducer);
  }

  std::vector<std::shared_ptr<GradientReducer>> living() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<GradientReducer>> found;
    for (const std::weak_ptr<GradientReducer>& one : all_) {
      if (auto reducer = one.lock()) {
        found.push_back(std::move(reducer));
      }
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<GradientReducer>> all_;
};

Reducers& reducers() {
  static auto* const instance = new Reducers;  // never destroyed: reducers may outlive static objects
  return *instance;
}

}  // namespace

std::shared_ptr<GradientReducer> GradientReducer::create(std::shared_ptr<comm::Communicator> communicator,
                                                         std::vector<ReducedParameter> parameters,
                                                         ReducerOptions options, Rethrow rethrow) {
  std::shared_ptr<GradientReducer> reducer(
      new GradientReducer(std::move(communicator), std::move(parameters), options, std::move(rethrow)));
  reducer->install_hooks();
  reducers().add(reducer);
  return reducer;
}

GradientReducer::GradientReducer(std::shared_ptr<comm::Communicator> communicator,
                                 std::vector<ReducedParameter> parameters, ReducerOptions options, Rethrow rethrow)
    : communicator_(std::move(communicator)), options_(options), rethrow_(std::move(rethrow)) {
  if (parameters.empty()) {
    throw InvalidArgument("the model has no parameter that requires a gradient; there is nothing to synchronise");
  }
  std::stable_partition(parameters.begin(), parameters.end(),
                        [](const ReducedParameter& parameter) { return !parameter.sparse_gradient; });
  for (ReducedParameter& given : parameters) {
    const at::Tensor& tensor = given.tensor;
    if (!tensor.is_leaf() || !tensor.requires_grad() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      const char* const kind = !tensor.is_leaf()         ? "the result of an operation"
                               : !tensor.requires_grad() ? "a tensor that requires none"
                                                         : "a tensor";
      throw InvalidArgument("parameter " + given.name + ": expected a dense CPU leaf that requires a gradient; found " +
                            kind + " on " + tensor.device().str());
    }
    index_of_[tensor.unsafeGetTensorImpl()] = parameters_.size();
    num_dense_ += given.sparse_gradient ? 0 : 1;
    Parameter parameter;
    parameter.given = std::move(given);
    parameters_.push_back(std::move(parameter));
  }
  // Gradients tend to arrive in the reverse of the order in which parameters are registered.
  std::vector<std::size_t> order(num_dense_);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build(order);
}

void GradientReducer::install_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.given.tensor);
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
  for (std::size_t i = 0; i < num_dense_; ++i) {
    const at::Tensor& tensor = parameters_[i].given.tensor;
    specs.push_back({dtype_of(tensor), static_cast<std::size_t>(tensor.numel())});
  }
  plan_ = plan_buckets(specs, order, options_.first_bucket_cap_bytes, options_.bucket_cap_bytes);
  std::vector<comm::BucketSpec> buckets;
  for (const BucketLayout& layout : plan_.buckets) {
    buckets.push_back({layout.dtype, layout.count, {}});
    for (const std::size_t parameter : layout.parameters) {
      buckets.back().slots.push_back({plan_.slots[parameter].offset, specs[parameter].count});
    }
  }
  exchange_ = communicator_->gradient_exchange(buckets, deadline());
  for (std::size_t i = 0; i < num_dense_; ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& tensor = parameter.given.tensor;
    const Slot& slot = plan_.slots[i];
    const MemoryView bucket = exchange_->bucket(slot.bucket);
    void* const data = bucket.bytes() + slot.offset * element_size(bucket.dtype);
    // As torch has it, a gradient has the strides of its parameter where these fill memory, else it is contiguous. The
    // tensor keeps the exchange alive: .grad may outlive this reducer.
    const auto keep = [exchange = exchange_](void*) {};
    at::Tensor fresh = tensor.is_non_overlapping_and_dense()
                           ? at::from_blob(data, tensor.sizes(), tensor.strides(), keep, tensor.options())
                           : at::from_blob(data, tensor.sizes(), keep, tensor.options());
    const bool bound = parameter.bound.is(tensor.grad());
    if (bound) {
      fresh.copy_(parameter.slot);
    }
    parameter.slot = std::move(fresh);
    parameter.bound = BoundGradient(parameter.slot);
    if (bound) {
      tensor.mutable_grad() = parameter.bound.tensor();
    }
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
          "parameter " + parameter.given.name +
          " received two gradients in one backward pass, after the first had been handed to the other ranks. "
          "Reentrant checkpointing does this: use torch.utils.checkpoint with use_reentrant=False");
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
  exchange_->begin({weight_, passes_to_measure_ > 0});
  weight_.reset();
  passes_to_measure_ -= passes_to_measure_ > 0 ? 1 : 0;
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
    parameter.slot.copy_(grad);
    grad = parameter.bound.tensor();
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
  take_averages();
  average_sparse_gradients();
  in_backward_ = false;
  if (!order_learnt_) {
    follow_arrival_order();
  }
}

void GradientReducer::take_averages() {
  for (std::size_t i = 0; i < num_dense_; ++i) {
    Parameter& parameter = parameters_[i];
    const Slot& slot = plan_.slots[i];
    at::Tensor& grad = parameter.given.tensor.mutable_grad();
    if (!grad.defined() && !exchange_->used_anywhere(slot.bucket, slot.index)) {
      continue;
    }
    if (const auto statistics = exchange_->statistics(slot.bucket, slot.index)) {
      parameter.bound = BoundGradient(parameter.slot, statistics);
    }
    grad = parameter.bound.tensor();
  }
}

void GradientReducer::average_sparse_gradients() {
  for (std::size_t i = num_dense_; i < parameters_.size(); ++i) {
    const ReducedParameter& given = parameters_[i].given;
    at::Tensor& grad = given.tensor.mutable_grad();
    if (grad.defined() && !grad.is_sparse()) {
      throw InvalidArgument("parameter " + given.name +
                            " of an embedding with sparse=True received a dense gradient, because something else uses "
                            "it, too; build the embedding with sparse=False");
    }
    grad = average_sparse(*communicator_, given.tensor, grad, exchange_->divisor(), deadline());
  }
}

void GradientReducer::set_weight(double weight) {
  weight_ = comm::checked_weight(weight);
}

std::optional<amp::GradientStatistics> GradientReducer::statistics(const at::Tensor& parameter) {
  const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
  if (found == index_of_.end()) {
    return std::nullopt;
  }
  passes_to_measure_ = kPassesToMeasure;
  const BoundGradient& bound = parameters_[found->second].bound;
  return bound.is(parameter.grad()) ? bound.statistics() : std::nullopt;
}

std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters) {
  std::vector<std::optional<amp::GradientStatistics>> all(parameters.size());
  const std::vector<std::shared_ptr<GradientReducer>> living = reducers().living();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (auto reducer = living.begin(); reducer != living.end() && !all[i]; ++reducer) {
      all[i] = (*reducer)->statistics(parameters[i]);
    }
  }
  return all;
}

void GradientReducer::follow_arrival_order() {
  std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
  for (std::size_t i = 0; i < num_dense_; ++i) {
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
