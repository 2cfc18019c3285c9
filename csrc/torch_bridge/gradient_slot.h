// The place of one parameter's gradient in its bucket, and what is there. It has one state at a time:
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

  // Moves the slot to `memory`, a tensor that nobody else ever holds, with what .grad shares with it.
  void place(at::Tensor memory);
  // Forgets its memory, which .grad must not share.
  void leave_place();

  // A backward pass has added to the gradient.
  void note_arrival() { averaged_ = false; }

  // Moves a foreign gradient into the slot. Throws InvalidArgument when it is sparse or has a graph.
  void take_gradient();

  // Prepares the slot for the sum over the ranks, in which this rank weighs `weight`: its gradient, or zeros when there
  // is none. An average, to which nothing was added, is the same on all ranks and stays so: it is weighed here. Returns
  // whether there is a gradient. Throws as take_gradient().
  bool prepare_for_sum(double weight);

  // The slot holds an average, and .grad becomes that.
  void take_average(std::optional<Measurement> measurement);

  // Prepares the slot for a sum to which this rank adds nothing, and takes away the gradient that lies there.
  void prepare_without_gradient();

  // Whether the reduction has measured the last average, and what it has found, as long as nobody can have changed it
  // since.
  bool was_measured() const { return bound_.has_measurement(); }
  std::optional<Measurement> believed() const;

  // The gradient with its elements in the order of the slot; undefined where there is none, or not such a one.
  at::Tensor gradient_in_order() const;

  const at::Tensor& memory() const { return memory_; }

 private:
  void copy_in(const at::Tensor& gradient) const;

  std::string name_;
  at::Tensor parameter_;
  at::Tensor memory_;  // shaped like the parameter, in the bucket
  BoundGradient bound_;
  bool averaged_ = false;  // what bound_ holds, if it is .grad
};

}  // namespace accelerate_cpp::grad
