#include "torch_bridge/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "torch_bridge/gradient_reducers.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {

using torch::autograd::variable_list;

namespace {

// Loops that clip ask for statistics in every step.
constexpr int kPassesToMeasure = 8;

}  // namespace

std::shared_ptr<GradientReducer> GradientReducer::create(std::shared_ptr<comm::Communicator> communicator,
                                                         std::vector<ReducedParameter> parameters,
                                                         std::vector<at::Tensor> left_out, ReducerOptions options,
                                                         Rethrow rethrow) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(std::move(communicator), std::move(parameters),
                                                               std::move(left_out), options, std::move(rethrow)));
  add_reducer(*reducer);
  reducer->take_back();
  return reducer;
}

GradientReducer::GradientReducer(std::shared_ptr<comm::Communicator> communicator,
                                 std::vector<ReducedParameter> parameters, std::vector<at::Tensor> left_out,
                                 ReducerOptions options, Rethrow rethrow)
    : communicator_(std::move(communicator)),
      options_(std::move(options)),
      rethrow_(std::move(rethrow)),
      left_out_(std::move(left_out)),
      registrations_seen_(registrations()),
      interruptions_(communicator_->interruptions()) {
  if (parameters.empty()) {
    throw InvalidArgument("the model has no parameter that requires a gradient; there is nothing to synchronise");
  }
  std::stable_partition(parameters.begin(), parameters.end(),
                        [](const ReducedParameter& parameter) { return !parameter.sparse_gradient; });
  const at::Device device = options_.device_group ? parameters.front().tensor.device() : at::Device(at::kCPU);
  for (ReducedParameter& given : parameters) {
    const at::Tensor& tensor = given.tensor;
    if (!tensor.is_leaf() || tensor.device() != device || tensor.layout() != at::kStrided) {
      throw InvalidArgument("parameter " + given.name + ": expected a dense leaf on " + device.str() + "; found " +
                            (tensor.is_leaf() ? "a tensor" : "the result of an operation") + " on " +
                            tensor.device().str());
    }
    index_of_[tensor.unsafeGetTensorImpl()] = parameters_.size();
    num_dense_ += given.sparse_gradient ? 0 : 1;
    Parameter parameter;
    parameter.given = std::move(given);
    parameters_.push_back(std::move(parameter));
  }
  agree_on_kernels();
  // Gradients tend to arrive in the reverse of the order in which parameters are registered.
  std::vector<std::size_t> order(num_dense_);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build(order);
}

void GradientReducer::agree_on_kernels() {
  if (options_.device_group) {
    std::uint8_t lacks = options_.device_group->kernels == nullptr ? 1 : 0;
    communicator_->all_reduce({&lacks, 1, DType::kUInt8}, comm::ReduceOp::kMax, deadline());
    if (lacks != 0) {
      options_.device_group->kernels.reset();
    }
  }
}

void GradientReducer::install_hook(std::size_t index) {
  Parameter& parameter = parameters_[index];
  // A tensor keeps its accumulator while it requires no gradient.
  const at::Tensor& tensor = parameter.given.tensor;
  const bool requires_grad = tensor.requires_grad();
  tensor.set_requires_grad(true);
  parameter.accumulator = torch::autograd::impl::grad_accumulator(tensor);
  tensor.set_requires_grad(requires_grad);
  parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [weak = weak_from_this(), index](const variable_list& outputs, const variable_list&) {
        if (const std::shared_ptr<GradientReducer> reducer = weak.lock()) {
          reducer->on_gradient(index);
        }
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs&) {
        throw InvalidArgument(
            "compiled autograd would leave out the averaging of gradients over the processes; compile the model "
            "without torch._dynamo.config.compiled_autograd");
      }));
}

void GradientReducer::remove_hook(Parameter& parameter) {
  if (parameter.accumulator) {
    parameter.accumulator->del_post_hook(parameter.hook);
    parameter.accumulator.reset();
  }
}

void GradientReducer::give_up(GradientReducer& successor) {
  bool shares = false;
  for (const auto& [tensor, index] : successor.index_of_) {
    const auto found = index_of_.find(tensor);
    if (found != index_of_.end()) {
      remove_hook(parameters_[found->second]);
      parameters_[found->second].successor = successor.weak_from_this();
      shares = true;
    }
  }
  if (shares) {
    successor.predecessors_.push_back(weak_from_this());
  }
}

bool GradientReducer::averages(const Parameter& parameter) const {
  return synchronizing_ || std::any_of(predecessors_.begin(), predecessors_.end(), [&](const auto& one) {
           const std::shared_ptr<const GradientReducer> predecessor = one.lock();
           return predecessor != nullptr && predecessor->synchronizing_ &&
                  predecessor->index_of_.contains(parameter.given.tensor.unsafeGetTensorImpl());
         });
}

void GradientReducer::take_back() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].accumulator && parameters_[i].successor.expired()) {
      install_hook(i);
    }
  }
}

GradientReducer::~GradientReducer() {
  remove_reducer(*this);
  for (Parameter& parameter : parameters_) {
    remove_hook(parameter);
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

bool GradientReducer::may_lack_parameters() {
  const std::uint64_t seen = std::exchange(registrations_seen_, registrations());
  return seen != registrations_seen_ || std::any_of(left_out_.begin(), left_out_.end(),
                                                    [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

void GradientReducer::set_synchronizing(bool synchronizing) {
  check_process();
  take_back();
  synchronizing_ = synchronizing;
}

std::unique_ptr<comm::GradientExchange> GradientReducer::make_exchange(const std::vector<comm::BucketSpec>& buckets) {
  device_exchange_ = nullptr;
  if (!hook_ && !options_.device_group) {
    return communicator_->gradient_exchange(buckets, deadline());
  }
  std::vector<std::vector<at::Tensor>> tensors;
  for (const BucketLayout& layout : plan_.buckets) {
    tensors.emplace_back();
    for (const std::size_t parameter : layout.parameters) {
      tensors.back().push_back(parameters_[parameter].given.tensor);
    }
  }
  if (hook_) {
    return std::make_unique<HookedGradientExchange>(*communicator_, buckets, std::move(tensors), hook_);
  }
  auto exchange = std::make_unique<DeviceGradientExchange>(
      *communicator_, buckets, tensors, options_.device_group->sum_over_ranks, options_.device_group->kernels);
  device_exchange_ = exchange.get();
  return exchange;
}

void GradientReducer::build(const std::vector<std::size_t>& order) {
  std::vector<ParameterSpec> specs;
  for (std::size_t i = 0; i < num_dense_; ++i) {
    const Elements elements = elements_of(parameters_[i].given.tensor);
    specs.push_back({elements.dtype, elements.count});
  }
  plan_ = plan_buckets(specs, order, options_.first_bucket_cap_bytes, options_.bucket_cap_bytes);
  std::vector<comm::BucketSpec> buckets;
  for (const BucketLayout& layout : plan_.buckets) {
    buckets.push_back({layout.dtype, layout.count, {}});
    for (const std::size_t parameter : layout.parameters) {
      buckets.back().slots.push_back({plan_.slots[parameter].offset, specs[parameter].count});
    }
  }
  const bool any_bound = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    return parameter.bound.is(parameter.given.tensor.grad());
  });
  if (!any_bound) {
    for (Parameter& parameter : parameters_) {
      parameter.slot.reset();
      parameter.bound = {};
    }
    exchange_.reset();
  }
  exchange_ = make_exchange(buckets);
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

void GradientReducer::set_weight(std::optional<double> weight) {
  weight_ = weight ? std::optional(comm::checked_weight(*weight)) : std::nullopt;
}

void GradientReducer::register_comm_hook(CommHook hook, std::function<void()> end_collectives) {
  check_process();
  if (hook_) {
    throw InvalidArgument("this model has a communication hook already; register one, once");
  }
  hook_ = std::move(hook);
  end_hooks_collectives_ = std::move(end_collectives);
  build(current_order());
}

std::vector<std::size_t> GradientReducer::current_order() const {
  std::vector<std::size_t> order;
  for (const BucketLayout& bucket : plan_.buckets) {
    order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  return order;
}

std::optional<Measurement> GradientReducer::statistics(const at::Tensor& parameter) {
  const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
  if (found == index_of_.end()) {
    return std::nullopt;
  }
  passes_to_measure_ = kPassesToMeasure;
  const BoundGradient& bound = parameters_[found->second].bound;
  return bound.is(parameter.grad()) ? bound.statistics() : std::nullopt;
}

void GradientReducer::learn_order() {
  std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
  for (std::size_t i = 0; i < num_dense_; ++i) {
    if (!parameters_[i].arrived) {
      order.push_back(static_cast<std::int64_t>(i));
    }
  }
  communicator_->broadcast({order.data(), order.size(), DType::kInt64}, 0, deadline());
  order_learnt_ = true;
  const std::vector<std::size_t> learnt(order.begin(), order.end());
  if (learnt != current_order()) {
    next_order_ = learnt;
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
