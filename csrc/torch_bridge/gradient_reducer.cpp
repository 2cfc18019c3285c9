#include "torch_bridge/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/grad/make_gradient_exchange.h"
#include "torch_bridge/gradient_reducers.h"
#include "torch_bridge/pass_checks.h"
#include "torch_bridge/sparse_gradient.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

// Loops that clip ask for statistics in every step.
constexpr int kPassesToMeasure = 8;

}  // namespace

// Lives as long as autograd knows of a pass whose end the caller does not announce.
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

std::shared_ptr<GradientReducer> GradientReducer::create(std::shared_ptr<comm::Communicator> communicator,
                                                         std::vector<ReducedParameter> parameters,
                                                         std::vector<at::Tensor> left_out, ReducerOptions options,
                                                         Rethrow rethrow) {
  std::shared_ptr<GradientReducer> reducer(new GradientReducer(std::move(communicator), std::move(parameters),
                                                               std::move(left_out), options, std::move(rethrow)));
  reducer->own_parameters();
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
      failure_(communicator_, options_.device_group ? options_.device_group->abort : nullptr) {
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
    num_dense_ += given.sparse_gradient ? 0 : 1;
    GradientSlot slot(given.name, tensor);
    parameters_.push_back({std::move(given), std::move(slot)});
  }
  agree_on_kernels();
  order_ = ArrivalOrder(num_dense_);
  // Gradients tend to arrive in the reverse of the order in which parameters are registered.
  std::vector<std::size_t> order(num_dense_);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  build(order);
}

GradientReducer::~GradientReducer() {
  remove_reducer(*this);
}

void GradientReducer::own_parameters() {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) {
    tensors.push_back(parameter.given.tensor);
  }
  ownership_ = std::make_shared<ParameterOwnership>(
      std::move(tensors), [weak = weak_from_this()](std::size_t parameter, bool came) {
        if (const std::shared_ptr<GradientReducer> reducer = weak.lock()) {
          reducer->on_gradient(parameter, came);
        }
      });
  add_reducer(*this);
  ownership_->take_free();
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

bool GradientReducer::may_lack_parameters() {
  const std::uint64_t seen = std::exchange(registrations_seen_, registrations());
  return seen != registrations_seen_ || std::any_of(left_out_.begin(), left_out_.end(),
                                                    [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

void GradientReducer::set_synchronizing(bool synchronizing) {
  check_not_forked(process_);
  ownership_->take_free();
  ownership_->set_synchronizing(synchronizing);
}

void GradientReducer::set_weight(std::optional<double> weight) {
  weight_ = weight ? std::optional(checked_weight(*weight)) : std::nullopt;
}

void GradientReducer::register_comm_hook(CommHook hook, std::function<void()> end_collectives) {
  check_not_forked(process_);
  if (hook_) {
    throw InvalidArgument("this model has a communication hook already; register one, once");
  }
  hook_ = std::move(hook);
  failure_.set_hook(std::move(end_collectives));
  build(current_order());
}

// The buckets.

std::unique_ptr<GradientExchange> GradientReducer::make_exchange(const std::vector<BucketSpec>& buckets) {
  device_exchange_ = nullptr;
  if (!hook_ && !options_.device_group) {
    return make_gradient_exchange(*communicator_, buckets, deadline());
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
  auto exchange = std::make_unique<DeviceGradientExchange>(*communicator_, buckets, tensors, *options_.device_group);
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
  std::vector<BucketSpec> buckets;
  for (const BucketLayout& layout : plan_.buckets) {
    buckets.push_back({layout.dtype, layout.count, {}});
    for (const std::size_t parameter : layout.parameters) {
      buckets.back().slots.push_back({plan_.slots[parameter].offset, specs[parameter].count});
    }
  }
  const bool any_in_place = std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    const GradientSlot::State state = parameter.slot.state();
    return state == GradientSlot::State::kOwn || state == GradientSlot::State::kAveraged;
  });
  if (!any_in_place) {
    for (Parameter& parameter : parameters_) {
      parameter.slot.leave_place();
    }
    exchange_.reset();  // so that old and new buckets do not exist at the same time
  }
  exchange_ = make_exchange(buckets);
  for (std::size_t i = 0; i < num_dense_; ++i) {
    parameters_[i].slot.place(slot_memory(i));
  }
}

// As torch has it, a gradient has the strides of its parameter where these fill memory, else it is contiguous. The
// tensor keeps the exchange alive: .grad may outlive this reducer.
at::Tensor GradientReducer::slot_memory(std::size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].given.tensor;
  const Slot& place = plan_.slots[parameter];
  const MemoryView bucket = exchange_->bucket(place.bucket);
  void* const data = bucket.bytes() + place.offset * element_size(bucket.dtype);
  const auto keep = [exchange = exchange_](void*) {};
  return tensor.is_non_overlapping_and_dense()
             ? at::from_blob(data, tensor.sizes(), tensor.strides(), keep, tensor.options())
             : at::from_blob(data, tensor.sizes(), keep, tensor.options());
}

std::vector<std::size_t> GradientReducer::current_order() const {
  std::vector<std::size_t> order;
  for (const BucketLayout& bucket : plan_.buckets) {
    order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  return order;
}

std::vector<std::size_t> GradientReducer::bucket_sizes_bytes() const {
  std::vector<std::size_t> sizes;
  for (const BucketLayout& bucket : plan_.buckets) {
    sizes.push_back(bucket.count * element_size(bucket.dtype));
  }
  return sizes;
}

void GradientReducer::learn_order() {
  const std::vector<std::size_t> learnt = order_.learn(*communicator_, deadline());
  if (learnt != current_order()) {
    next_order_ = learnt;
  }
}

// A backward pass.

void GradientReducer::on_gradient(std::size_t index, bool came) {
  Parameter& parameter = parameters_[index];
  if (came) {
    parameter.slot.note_arrival();
  }
  if (!ownership_->averages(index)) {
    return;
  }
  try {
    check_not_forked(process_);
    begin_backward();
    if (parameter.arrived) {
      throw_second_gradient(parameter.given.name);
    }
    parameter.arrived = true;
    if (parameter.given.sparse_gradient) {
      return;
    }
    if (came) {
      parameter.slot.take_gradient();  // while it is in cache
    }
    if (!order_.is_learnt()) {
      order_.note(index);
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
      throw_other_pass();
    }
    return;
  }
  in_backward_ = true;
  graph_task_ = current;
  if (!caller_tells_) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [pass = std::make_shared<Pass>(weak_from_this())] { pass->end(); });
  }
  begin_round({std::exchange(weight_, std::nullopt), passes_to_measure_ > 0});
  passes_to_measure_ -= passes_to_measure_ > 0 ? 1 : 0;
  missing_.clear();
  for (const BucketLayout& bucket : plan_.buckets) {
    missing_.push_back(
        static_cast<std::size_t>(std::count_if(bucket.parameters.begin(), bucket.parameters.end(),
                                               [this](std::size_t parameter) { return ownership_->owns(parameter); })));
  }
  published_.assign(plan_.buckets.size(), false);
}

void GradientReducer::begin_round(const RoundOptions& options) {
  if (!caller_tells_) {
    failure_.begin_pass();
  }
  failure_.check_group();
  order_.begin_pass();
  for (Parameter& parameter : parameters_) {
    parameter.arrived = false;
  }
  if (!next_order_.empty()) {
    build(next_order_);
    next_order_.clear();  // unless that failed; then it is done before the next pass
  }
  round_weight_ = options.weight;
  exchange_->begin(options, deadline());
}

void GradientReducer::publish(std::size_t bucket) {
  const BucketLayout& layout = plan_.buckets[bucket];
  std::uint8_t* const used = exchange_->used_slots(bucket);
  for (std::size_t s = 0; s < layout.parameters.size(); ++s) {
    GradientSlot& slot = parameters_[layout.parameters[s]].slot;
    if (ownership_->owns(layout.parameters[s])) {
      used[s] = slot.prepare_for_sum(round_weight_) ? 1 : 0;
    } else {
      slot.memory().zero_();
      used[s] = 0;
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
  if (!order_.is_learnt()) {
    learn_order();
  }
}

void GradientReducer::take_averages() {
  for (std::size_t i = 0; i < num_dense_; ++i) {
    GradientSlot& slot = parameters_[i].slot;
    const Slot& place = plan_.slots[i];
    const bool has_gradient = slot.state() != GradientSlot::State::kEmpty;
    if (ownership_->owns(i) && (has_gradient || exchange_->used_anywhere(place.bucket, place.index))) {
      slot.take_average(measured(place), round_weight_.has_value());
    }
  }
}

void GradientReducer::average_sparse_gradients(bool with_own) {
  for (std::size_t i = num_dense_; i < parameters_.size(); ++i) {
    const ReducedParameter& given = parameters_[i].given;
    if (!ownership_->owns(i)) {
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

void GradientReducer::take_part_without_gradients() {
  check_not_forked(process_);
  begin_round({0.0, passes_to_measure_ > 0});
  for (std::size_t i = 0; i < num_dense_; ++i) {
    parameters_[i].slot.prepare_without_gradient();
  }
  for (std::size_t bucket = 0; bucket < plan_.buckets.size(); ++bucket) {
    std::fill_n(exchange_->used_slots(bucket), plan_.buckets[bucket].parameters.size(), std::uint8_t{0});
    exchange_->publish(bucket);
  }
  exchange_->finish(deadline());
  average_sparse_gradients(false);
  if (!order_.is_learnt()) {
    learn_order();
  }
}

// How a pass ends.

void GradientReducer::expect_backward() {
  caller_tells_ = true;
  failure_.begin_pass();
}

void GradientReducer::backward_ended() {
  if (in_backward_) {
    end_backward();
  }
  caller_tells_ = false;
}

void GradientReducer::backward_failed(const std::string& reason) noexcept {
  in_backward_ = caller_tells_ = false;
  if (synchronizing()) {
    give_up_pass(reason);
  }
}

void GradientReducer::pass_failed() noexcept {
  in_backward_ = false;
  give_up_pass("its backward pass ended in an exception");
}

void GradientReducer::give_up_pass(const std::string& reason) noexcept {
  // Their memory belongs to the next pass, and peers may still write into it. Without gradients, a step taken by
  // mistake changes nothing.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (ownership_->owns(i)) {
      parameters_[i].given.tensor.mutable_grad().reset();
    }
  }
  failure_.tell(reason, device_exchange_ != nullptr && device_exchange_->completing(), deadline());
}

// Statistics.

std::optional<Measurement> GradientReducer::measured(const Slot& place) const {
  if (device_exchange_ != nullptr) {
    return device_exchange_->device_statistics(place.bucket, place.index);
  }
  return exchange_->statistics(place.bucket, place.index);
}

std::optional<Measurement> GradientReducer::measured_again(std::size_t parameter) const {
  const at::Tensor gradient = parameters_[parameter].slot.gradient_in_order();
  if (!gradient.defined()) {
    return std::nullopt;
  }
  const Slot& place = plan_.slots[parameter];
  if (device_exchange_ != nullptr) {
    return device_exchange_->measure(place.bucket, place.index, gradient);
  }
  const Elements elements = elements_of(gradient);
  return exchange_->measure(place.bucket, place.index, {gradient.data_ptr(), elements.count, elements.dtype});
}

std::optional<Measurement> GradientReducer::statistics(const at::Tensor& parameter) {
  const std::optional<std::size_t> index = ownership_->find(parameter);
  if (!index) {
    return std::nullopt;
  }
  passes_to_measure_ = kPassesToMeasure;
  const GradientSlot& slot = parameters_[*index].slot;
  if (!slot.was_measured()) {
    return std::nullopt;
  }
  std::optional<Measurement> believed = slot.believed();
  return believed ? believed : measured_again(*index);
}

}  // namespace accelerate_cpp::grad
