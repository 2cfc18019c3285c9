// Which of its parameters a reducer averages, and the hooks behind their gradient accumulators.
//
// A parameter that several living reducers have (models that share it, or a model that was wrapped again) belongs to
// the newest of them, no matter which model computes its gradient. When the newer reducer is gone, an older one gets it
// back.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace accelerate_cpp::grad {

class ParameterOwnership : public std::enable_shared_from_this<ParameterOwnership> {
 public:
  // Called behind the accumulator of a parameter that is owned, by its index. `came` is whether a gradient has been
  // accumulated: autograd may have none for the parameter, or the parameter may have ceased to require one.
  using Arrived = std::function<void(std::size_t parameter, bool came)>;

  ParameterOwnership(std::vector<at::Tensor> parameters, Arrived arrived);
  ~ParameterOwnership();
  ParameterOwnership(const ParameterOwnership&) = delete;
  ParameterOwnership& operator=(const ParameterOwnership&) = delete;

  // Takes the parameters that have no newer living owner.
  void take_free();
  // Gives up to `newer` the parameters that both have.
  void give_up(ParameterOwnership& newer);

  bool owns(std::size_t parameter) const { return parameters_[parameter].accumulator != nullptr; }
  std::optional<std::size_t> find(const at::Tensor& tensor) const;

  // Whether backward passes average the gradients of its reducer.
  void set_synchronizing(bool synchronizing) { synchronizing_ = synchronizing; }
  bool synchronizing() const { return synchronizing_; }
  // Whether they average that of a parameter: for its reducer or for an older one.
  bool averages(std::size_t parameter) const;

 private:
  struct Parameter {
    at::Tensor tensor;
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;  // null where it is not owned
    std::uintptr_t hook = 0;
    std::weak_ptr<const ParameterOwnership> newer;  // has the parameter if `accumulator` is null
  };

  void install_hook(std::size_t parameter);
  static void remove_hook(Parameter& parameter);

  const Arrived arrived_;
  std::vector<Parameter> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index_of_;
  std::vector<std::weak_ptr<const ParameterOwnership>> older_;  // who have given up parameters
  bool synchronizing_ = true;
};

}  // namespace accelerate_cpp::grad
