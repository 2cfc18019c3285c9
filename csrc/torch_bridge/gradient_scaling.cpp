#include "torch_bridge/gradient_scaling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::amp {
namespace {

// The piece that one thread takes at a time: large enough to hide the cost of scheduling.
constexpr std::size_t kPartElements = std::size_t{1} << 17;

void check(const at::Tensor& gradient) {
  if (!gradient.device().is_cpu()) {
    throw InvalidArgument("expected a gradient on the CPU; found one on " + gradient.device().str());
  }
}

// The elements of a gradient in memory without gaps.
class Elements {
 public:
  Elements(const at::Tensor& gradient, bool writes) : gradient_(gradient) {
    check(gradient);
    if (gradient.is_sparse()) {
      // Elements that stand several times are added up before their squares are.
      dense_ = writes ? gradient._values() : gradient.coalesce()._values();
    } else {
      is_copy_ = !gradient.is_non_overlapping_and_dense();
      dense_ = is_copy_ ? gradient.contiguous() : gradient;
    }
  }

  // A complex number is two real ones.
  MemoryView view() const {
    const at::Tensor real = dense_.is_complex() ? at::view_as_real(dense_) : dense_;
    return {real.data_ptr(), static_cast<std::size_t>(real.numel()), dtype_of(real)};
  }

  // After the elements were written.
  void finish() const {
    if (is_copy_) {
      gradient_.copy_(dense_);
    } else if (!gradient_.is_inference()) {
      gradient_.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  at::Tensor gradient_;
  at::Tensor dense_;
  bool is_copy_ = false;
};

struct Part {
  std::size_t gradient;
  MemoryView view;
  GradientStatistics statistics;
};

std::vector<Part> parts_of(const std::vector<Elements>& all) {
  std::vector<Part> parts;
  for (std::size_t g = 0; g < all.size(); ++g) {
    const MemoryView whole = all[g].view();
    for (std::size_t begin = 0; begin < whole.count; begin += kPartElements) {
      parts.push_back({g, within(whole, begin, kPartElements), {}});
    }
  }
  return parts;
}

template <class Action>
std::vector<GradientStatistics> run(const std::vector<Elements>& all, const Action& action) {
  std::vector<Part> parts = parts_of(all);
  at::parallel_for(0, static_cast<std::int64_t>(parts.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Part& part = parts[static_cast<std::size_t>(i)];
      part.statistics = action(part.view);
    }
  });
  std::vector<GradientStatistics> statistics(all.size());
  for (const Part& part : parts) {
    statistics[part.gradient] += part.statistics;
  }
  return statistics;
}

std::vector<Elements> elements_of(const std::vector<at::Tensor>& gradients, bool writes) {
  std::vector<Elements> all;
  all.reserve(gradients.size());
  for (const at::Tensor& gradient : gradients) {
    all.emplace_back(gradient, writes);
  }
  return all;
}

}  // namespace

std::vector<GradientStatistics> scale_gradients(const std::vector<at::Tensor>& gradients, double factor) {
  const at::NoGradGuard no_grad;
  const std::vector<Elements> all = elements_of(gradients, true);
  std::vector<GradientStatistics> statistics =
      run(all, [&](const MemoryView& part) { return scale_gradient(part, factor); });
  for (std::size_t g = 0; g < all.size(); ++g) {
    all[g].finish();
    if (gradients[g].is_sparse() && !gradients[g].is_coalesced()) {
      statistics[g] = measure_gradients({gradients[g]})[0];
    }
  }
  return statistics;
}

std::vector<GradientStatistics> measure_gradients(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  return run(elements_of(gradients, false), [](const MemoryView& part) { return measure_gradient(part); });
}

}  // namespace accelerate_cpp::amp
