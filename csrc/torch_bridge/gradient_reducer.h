// Averages gradients over the ranks of a communicator while autograd computes them.
//
// Every parameter has a slot in a bucket of a GradientExchange. A hook behind each gradient accumulator copies the
// gradient into its slot once, if it is not there already, and makes the slot the parameter's .grad; a bucket whose
// slots are full is published. When the backward pass ends, the rest is published and the averages are awaited, so that
// .grad holds the average when backward() returns.
//
// The first synchronised backward pass teaches the order in which gradients arrive; rank 0's order then decides the
// buckets on every rank. A parameter that no rank used keeps .grad undefined; one that some rank used gets its average
// everywhere.
//
// Slots share memory with .grad: a gradient kept beyond zero_grad() must be cloned, as with torch's
// gradient_as_bucket_view. One backward pass at a time. Reentrant checkpointing is refused.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/comm/communicator.h"
#include "core/grad/bucket_plan.h"

namespace accelerate_cpp::grad {

struct ReducerOptions {
  std::size_t first_bucket_cap_bytes;
  std::size_t bucket_cap_bytes;
  std::chrono::milliseconds timeout;
};

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  // Turns the exception in flight into one that autograd hands to Python with its type; called inside a catch block.
  using Rethrow = std::function<void()>;

  // Collective. `parameters` are dense CPU leaves that require gradients, in the same order on every rank.
  static std::shared_ptr<GradientReducer> create(std::shared_ptr<comm::Communicator> communicator,
                                                 std::vector<at::Tensor> parameters, ReducerOptions options,
                                                 Rethrow rethrow);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Whether backward passes average gradients or leave them local. Throws InvalidArgument in a forked child, where
  // either would write into the gradients of the process that made the reducer.
  void set_synchronizing(bool synchronizing);
  bool synchronizing() const { return synchronizing_; }

  // Makes a backward pass that ended in an exception known to the other ranks, unless they do not take part in it.
  void abort(const std::string& reason) noexcept;

  // Sizes of the buckets in bytes, in the order in which they are expected to fill.
  std::vector<std::size_t> bucket_sizes_bytes() const;

 private:
  struct Parameter {
    at::Tensor tensor;
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    std::uintptr_t hook = 0;
    at::Tensor slot;       // shaped like the tensor, in the bucket
    bool arrived = false;  // in the current backward pass
  };

  GradientReducer(std::shared_ptr<comm::Communicator> communicator, std::vector<at::Tensor> parameters,
                  ReducerOptions options, Rethrow rethrow);

  void check_process() const;
  void install_hooks();
  void build(const std::vector<std::size_t>& order);
  void on_gradient(std::size_t parameter);
  void begin_backward();
  void end_backward();
  void publish(std::size_t bucket);
  // Moves the gradient into its slot; false when the parameter has none.
  bool bind(Parameter& parameter);
  void follow_arrival_order();
  Deadline deadline() const { return Deadline::after(options_.timeout); }

  std::shared_ptr<comm::Communicator> communicator_;
  ReducerOptions options_;
  Rethrow rethrow_;
  const std::uint64_t fork_generation_ = fork_generation();
  std::vector<Parameter> parameters_;
  BucketPlan plan_;
  std::shared_ptr<comm::GradientExchange> exchange_;
  bool synchronizing_ = true;

  // The current backward pass.
  bool in_backward_ = false;
  int graph_task_ = -1;
  std::vector<std::size_t> missing_;  // gradients that each bucket still waits for
  std::vector<std::size_t> arrival_;  // parameters in the order of their gradients, in the first pass
  bool order_learnt_ = false;
};

}  // namespace accelerate_cpp::grad
