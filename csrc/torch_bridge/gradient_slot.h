// The place of one parameter's gradient in its bucket. It is in one of these states:
//
//   kEmpty     the parameter has no gradient, and what the slot holds means nothing
//   kOwn       a gradient of this rank: of this pass, of local passes before it, or added to an average
//   kAveraged  the last average, to which nothing has been added
//   kForeign   the program has put a tensor of its own into .grad
//
// In the states kOwn and kAveraged .grad shares memory with the slot.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "torch_bridge/bound_gradient.h"

namespace accelerate_cpp::grad {

class GradientSlot {
 public:
  enum class State { kEmpty, kOwn, kAveraged, kForeign };

  // `name` is for messages.
  GradientSlot(std::string name, at::Tensor parameter) : name_(std::move(name)), parameter_(std::move(parameter)) {}

  State state() const;

  // Moves the slot, and a .grad that shares memory with it, to `memory`, a tensor that nothing else ever holds.
  void place(at::Tensor memory);
  // Forgets its memory, which .grad must not share.
  void leave_place();

  // A backward pass has added to the gradient.
  void note_arrival() { averaged_ = false; }

  // Moves a foreign gradient into the slot. Throws InvalidArgument when it is sparse or has a graph.
  void take_gradient();

  // Prepares the slot for the sum over the ranks, in which this rank weighs `weight`, if they are weighed: its
  // gradient, or zeros when there is none. A weighed average to which nothing was added is the same on all ranks, and
  // stays the same: it is weighed here. Other averages are sums of a share each, which the weights have yet to divide.
  // Returns whether there is a gradient. Throws as take_gradient().
  bool prepare_for_sum(std::optional<double> weight);

  // The slot holds an average, and .grad becomes that. `is_weighed` if it was divided by the weights of the ranks.
  void take_average(std::optional<Measurement> measurement, bool is_weighed);

  // Prepares the slot for a sum to which this rank adds nothing, and takes away the gradient that lies there.
  void prepare_without_gradient();

  // Whether the reduction has measured the last average, and the result, which holds as long as nothing can have
  // changed the average since.
  bool was_measured() const { return bound_.has_measurement(); }
  std::optional<Measurement> believed() const;

  // The gradient with its elements in the order of the slot; undefined if there is none or its elements are in another
  // order.
  at::Tensor gradient_in_order() const;

  const at::Tensor& memory() const { return memory_; }

 private:
  void copy_in(const at::Tensor& gradient) const;

  std::string name_;
  at::Tensor parameter_;
  at::Tensor memory_;  // shaped like the parameter, in the bucket
  BoundGradient bound_;
  bool averaged_ = false;  // what bound_ holds, if it is .grad
  bool weighed_ = false;   // the average
};

}  // namespace accelerate_cpp::grad
