#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/amp/loss_scale.h"
#include "torch_bridge/gradient_scaling.h"

namespace accelerate_cpp::bindings {
namespace {

using Pairs = std::vector<std::pair<double, std::uint64_t>>;

Pairs pairs(const std::vector<amp::GradientStatistics>& all) {
  Pairs result;
  for (const amp::GradientStatistics& statistics : all) {
    result.emplace_back(statistics.sum_of_squares, statistics.num_non_finite);
  }
  return result;
}

amp::LossScaleOptions options(double init_scale, double growth_factor, double backoff_factor, int growth_interval) {
  return {init_scale, growth_factor, backoff_factor, growth_interval};
}

}  // namespace

void bind_amp(py::module_& module) {
  using amp::LossScale;
  const amp::LossScaleOptions defaults;
  py::class_<LossScale>(module, "LossScale", "The scale of the loss in fp16 training (csrc/core/amp/loss_scale.h).")
      .def(py::init([](double init_scale, double growth_factor, double backoff_factor, int growth_interval) {
             return LossScale(options(init_scale, growth_factor, backoff_factor, growth_interval));
           }),
           py::arg("init_scale") = defaults.init_scale, py::arg("growth_factor") = defaults.growth_factor,
           py::arg("backoff_factor") = defaults.backoff_factor, py::arg("growth_interval") = defaults.growth_interval)
      .def_property_readonly("value", &LossScale::value)
      .def_property_readonly("growth_tracker", &LossScale::growth_tracker,
                             "Steps without an overflow since the scale has last changed.")
      .def_property_readonly("growth_factor", [](const LossScale& scale) { return scale.options().growth_factor; })
      .def_property_readonly("backoff_factor", [](const LossScale& scale) { return scale.options().backoff_factor; })
      .def_property_readonly("growth_interval", [](const LossScale& scale) { return scale.options().growth_interval; })
      .def("update", &LossScale::update, py::arg("overflow"), "After a step: whether some gradient was not finite.")
      .def("set", &LossScale::set, py::arg("scale"), "Starts over from a scale.")
      .def(
          "restore",
          [](LossScale& self, double scale, int growth_tracker, double growth_factor, double backoff_factor,
             int growth_interval) {
            self.restore(scale, growth_tracker, options(scale, growth_factor, backoff_factor, growth_interval));
          },
          py::arg("scale"), py::arg("growth_tracker"), py::arg("growth_factor"), py::arg("backoff_factor"),
          py::arg("growth_interval"), "Continues from a saved state.");
  module.def(
      "scale_gradients",
      [](const std::vector<at::Tensor>& gradients, double factor) {
        const py::gil_scoped_release release;
        return pairs(amp::scale_gradients(gradients, factor));
      },
      py::arg("gradients"), py::arg("factor"),
      "Multiplies CPU tensors in place; of each, the sum of squares and the number of values that are not finite.");
  module.def(
      "measure_gradients",
      [](const std::vector<at::Tensor>& gradients) {
        const py::gil_scoped_release release;
        return pairs(amp::measure_gradients(gradients));
      },
      py::arg("gradients"), "The same of tensors as they are.");
}

}  // namespace accelerate_cpp::bindings
