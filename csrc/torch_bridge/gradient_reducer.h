// Averages gradients over the ranks of a communicator while autograd computes them.
//
// Every parameter has a slot in a bucket of a GradientExchange. A hook behind each gradient accumulator copies the
// gradient into its slot once, if it is not there already, and makes the slot the parameter's .grad; a bucket of which
// all parameters have been seen is published. When the backward pass ends, the rest is published and the averages are
// awaited, so that .grad holds the average when backward() returns. A rank whose autograd has no gradient for a
// parameter counts with zero.
//
// The first synchronised backward pass teaches the order in which gradients arrive; rank 0's order decides the buckets
// on every rank from the second pass on, when gradients are cleared as a rule, so that old and new buckets need not
// exist together. A parameter that no rank used keeps .grad undefined; one that some rank used gets its average
// everywhere.
//
// Slots share memory with .grad: a gradient kept beyond zero_grad() must be cloned, as with torch's
// gradient_as_bucket_view. One backward pass at a time. Sparse gradients have no slots: they are averaged one by one at
// the end of the pass.
//
// Where the parameters are on an accelerator, buckets are, too, and a device group sums them; what ranks have to agree
// on goes through the communicator all the same.
//
// Once statistics() has been asked for, the reduction also measures the averages, which spares a pass over their
// memory. On an accelerator, the figures stay there.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/comm/communicator.h"
#include "core/grad/arrival_order.h"
#include "core/grad/bucket_plan.h"
#include "torch_bridge/device_gradient_exchange.h"
#include "torch_bridge/gradient_slot.h"
#include "torch_bridge/hooked_gradient_exchange.h"
#include "torch_bridge/parameter_ownership.h"
#include "torch_bridge/pass_failure.h"

namespace accelerate_cpp::grad {

struct ReducerOptions {
  std::size_t first_bucket_cap_bytes;
  std::size_t bucket_cap_bytes;
  std::chrono::milliseconds timeout;
  std::optional<DeviceGroup> device_group;  // none where parameters are on the CPU
};

// A dense leaf, on the CPU or, like all others, on one accelerator. Its gradients are averaged whenever it requires
// any.
struct ReducedParameter {
  std::string name;  // for messages
  at::Tensor tensor;
  bool sparse_gradient = false;  // its gradients are sparse
};

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  // Turns the exception in flight into one that autograd hands to Python with its type; called inside a catch block.
  using Rethrow = std::function<void()>;

  // Collective. `parameters` are in the same order on every rank; `left_out` are those of the model that require no
  // gradient.
  static std::shared_ptr<GradientReducer> create(std::shared_ptr<comm::Communicator> communicator,
                                                 std::vector<ReducedParameter> parameters,
                                                 std::vector<at::Tensor> left_out, ReducerOptions options,
                                                 Rethrow rethrow);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Leaves the parameters that both have to `newer`.
  void give_up(GradientReducer& newer) { ownership_->give_up(*newer.ownership_); }

  // Whether there may be parameters by now that it should average and does not: one that was left out requires a
  // gradient, or modules of this process have got parameters since it was last asked.
  bool may_lack_parameters();

  // Whether backward passes average gradients or leave them local. Throws InvalidArgument in a forked child, where
  // either would write into the gradients of the process that made the reducer.
  void set_synchronizing(bool synchronizing);
  bool synchronizing() const { return ownership_->synchronizing(); }

  // What the gradients of this rank weigh in the next pass that averages: then sums over the ranks are divided by the
  // sum of their weights instead of their number. Either all ranks set one or none does. Throws InvalidArgument when it
  // is negative or not finite. None takes back what was set and has not been used. Gradients of earlier steps are to be
  // cleared before such a pass adds to them, as their share in the sum is not known.
  void set_weight(std::optional<double> weight);

  // Collective, and before the first backward pass: lets `hook` average the buckets from now on. Throws InvalidArgument
  // when there is one already. On an accelerator a failed pass leaves collectives of the hook's that only
  // `end_collectives` ends, for good.
  void register_comm_hook(CommHook hook, std::function<void()> end_collectives = {});

  // What a rank that has no more batches does while the others average: nothing of its own goes into their averages,
  // which its gradients, if it has any, do not become. The others have weights.
  void take_part_without_gradients();

  // What the gradient of a parameter is like, if it is one of this reducer's that was measured in the last reduction:
  // what was found there, or, if somebody may have changed the gradient since, what is found now by the same order of
  // sums. So ranks whose gradients are equal read equal figures, whichever of them has looked at its gradients.
  std::optional<Measurement> statistics(const at::Tensor& parameter);

  // A caller who calls expect_backward() before a backward pass says how it ends: backward_ended() returns when the
  // averages are there. Without, autograd says so, at the end of the pass in which the first gradient arrived; with
  // reentrant checkpointing that may be a nested one, and an InvalidArgument is thrown.
  //
  // A pass that ends in an exception makes the other ranks raise, too, unless they do not take part in it, and loses
  // its gradients on all ranks, which go on together from there. They get to know the `reason`. A process group that
  // sums buckets has ended then, and passes throw PeerLost: the ranks go on with reducers that have another one.
  void expect_backward();
  void backward_ended();
  void backward_failed(const std::string& reason) noexcept;

  // Sizes of the buckets in bytes, in the order in which they are expected to fill.
  std::vector<std::size_t> bucket_sizes_bytes() const;

 private:
  struct Parameter {
    ReducedParameter given;
    GradientSlot slot;
    bool arrived = false;  // in the current backward pass
  };
  class Pass;

  GradientReducer(std::shared_ptr<comm::Communicator> communicator, std::vector<ReducedParameter> parameters,
                  std::vector<at::Tensor> left_out, ReducerOptions options, Rethrow rethrow);

  // On the device all ranks have kernels or none uses them.
  void agree_on_kernels();
  void own_parameters();
  std::unique_ptr<GradientExchange> make_exchange(const std::vector<BucketSpec>& buckets);
  void build(const std::vector<std::size_t>& order);
  at::Tensor slot_memory(std::size_t parameter) const;
  std::vector<std::size_t> current_order() const;

  void on_gradient(std::size_t parameter, bool came);
  void begin_backward();
  void begin_round(const RoundOptions& options);
  void end_backward();
  void pass_failed() noexcept;  // as autograd says
  void give_up_pass(const std::string& reason) noexcept;
  void publish(std::size_t bucket);
  void take_averages();
  std::optional<Measurement> measured(const Slot& place) const;
  std::optional<Measurement> measured_again(std::size_t parameter) const;
  // With the gradients of this rank, which become the averages, or without.
  void average_sparse_gradients(bool with_own);
  // Lets rank 0's order of arrival decide the buckets from the next pass on.
  void learn_order();
  Deadline deadline() const { return Deadline::after(options_.timeout); }

  std::shared_ptr<comm::Communicator> communicator_;
  ReducerOptions options_;
  Rethrow rethrow_;
  const OwnerProcess process_;
  std::vector<Parameter> parameters_;  // those with dense gradients first
  std::size_t num_dense_ = 0;
  std::vector<at::Tensor> left_out_;
  std::uint64_t registrations_seen_;
  std::shared_ptr<ParameterOwnership> ownership_;
  BucketPlan plan_;  // of those with dense gradients
  CommHook hook_;    // if there is one
  std::shared_ptr<GradientExchange> exchange_;
  DeviceGradientExchange* device_exchange_ = nullptr;  // exchange_, if it is one
  PassFailure failure_;
  ArrivalOrder order_{0};
  std::vector<std::size_t> next_order_;  // to be followed from the next pass on, if any

  // The current backward pass.
  bool in_backward_ = false;
  bool caller_tells_ = false;  // how it ends
  int graph_task_ = -1;
  std::vector<std::size_t> missing_;  // parameters that each bucket still waits for
  std::vector<bool> published_;       // by bucket
  std::optional<double> round_weight_;
  std::optional<double> weight_;  // of the next pass that averages
  int passes_to_measure_ = 0;     // so many more, if nobody asks for statistics again
};

}  // namespace accelerate_cpp::grad
