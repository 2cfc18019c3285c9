// Measures the gradients of one process while autograd computes them and they still lie in a cache: what
// GradientReducer does where gradients are averaged.
//
// Dense CPU gradients of the usual floating dtypes only, once statistics() has been asked for. One that the program has
// taken hold of gets another tensor object with the same memory, so that it shows when it does so again. Gradients are
// not kept alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "torch_bridge/statistics_sources.h"

namespace accelerate_cpp::grad {

class GradientMeter final : public StatisticsSource, public std::enable_shared_from_this<GradientMeter> {
 public:
  // Of those of `parameters` that require a gradient now.
  static std::shared_ptr<GradientMeter> create(const std::vector<at::Tensor>& parameters);
  ~GradientMeter() override;

  std::optional<amp::GradientStatistics> statistics(const at::Tensor& parameter) override;

 private:
  struct Parameter {
    at::Tensor tensor;
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    std::uintptr_t hook = 0;
    int passes_to_measure = 0;
    // What was measured:
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>()};
    std::int64_t version = 0;
    amp::GradientStatistics statistics;
  };

  explicit GradientMeter(const std::vector<at::Tensor>& parameters);
  void install_hooks();
  static void measure(Parameter& parameter);

  std::vector<Parameter> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index_of_;
};

}  // namespace accelerate_cpp::grad
