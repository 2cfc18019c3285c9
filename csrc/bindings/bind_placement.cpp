#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/placement/device_choice.h"

namespace accelerate_cpp::bindings {

void bind_placement(py::module_& module) {
  module.def(
      "choose_device",
      [](bool force_cpu, const std::string& forced, int local_rank,
         const std::vector<std::pair<std::string, int>>& accelerators) {
        placement::DeviceRequest request{force_cpu, forced, local_rank, {}};
        for (const auto& [type, count] : accelerators) {
          request.accelerators.push_back({type, count});
        }
        return placement::choose_device(request);
      },
      py::kw_only(), py::arg("force_cpu"), py::arg("forced"), py::arg("local_rank"), py::arg("accelerators"),
      "The name of the device a process trains on (csrc/core/placement/device_choice.h).");
}

}  // namespace accelerate_cpp::bindings
