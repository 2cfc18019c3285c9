#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/comm/shm/memory_limit.h"
#include "core/placement/device_choice.h"
#include "core/placement/partition.h"

namespace accelerate_cpp::bindings {

namespace {

std::optional<std::size_t> memory_left([[maybe_unused]] const std::string& proc,
                                       [[maybe_unused]] const std::string& mounts) {
#ifdef __linux__
  return comm::memory_left(proc, mounts);
#else
  return std::nullopt;
#endif
}

std::vector<placement::Module> modules_of(const std::vector<std::pair<std::size_t, std::size_t>>& ranges) {
  std::vector<placement::Module> modules;
  modules.reserve(ranges.size());
  for (const auto& [begin, end] : ranges) {
    modules.push_back({begin, end});
  }
  return modules;
}

std::optional<std::vector<int>> devices_of(const std::optional<placement::Partition>& partition) {
  return partition ? std::optional(partition->device_of_block) : std::nullopt;
}

}  // namespace

void bind_placement(py::module_& module) {
  module.def(
      "choose_device",
      [](bool force_cpu, const std::string& forced, int local_rank,
         const std::vector<std::tuple<std::string, int, bool>>& accelerators) {
        placement::DeviceRequest request{force_cpu, forced, local_rank, {}};
        for (const auto& [type, count, index_by_rank] : accelerators) {
          request.accelerators.push_back({type, count, index_by_rank});
        }
        return placement::choose_device(request);
      },
      py::kw_only(), py::arg("force_cpu"), py::arg("forced"), py::arg("local_rank"), py::arg("accelerators"),
      "The name of the device a process trains on (csrc/core/placement/device_choice.h).");
  module.def("memory_left", &memory_left, py::kw_only(), py::arg("proc"), py::arg("mounts"),
             "Bytes that can be had without swapping, of the machine and of what control groups leave; None where the "
             "system does not say (csrc/core/comm/shm/memory_limit.h).");
  module.def(
      "balanced_partition",
      [](const std::vector<std::int64_t>& block_bytes, const std::vector<std::int64_t>& capacities,
         const std::vector<std::pair<std::size_t, std::size_t>>& modules, double tolerance) {
        const py::gil_scoped_release release;
        return devices_of(placement::balanced_partition(block_bytes, capacities, modules_of(modules), tolerance));
      },
      py::kw_only(), py::arg("block_bytes"), py::arg("capacities"),
      py::arg("modules") = std::vector<std::pair<std::size_t, std::size_t>>{}, py::arg("tolerance") = 0.0,
      "For each block, in order, the index of its device, with the smallest largest load, or one near it that splits "
      "fewer modules; None if they do not fit. `modules`: of each the number of its first block, and of the one after "
      "its last (csrc/core/placement/partition.h).");
  module.def(
      "any_fit",
      [](const std::vector<std::int64_t>& block_bytes, const std::vector<std::int64_t>& capacities,
         std::int64_t most_steps) {
        const py::gil_scoped_release release;
        return devices_of(placement::any_fit(block_bytes, capacities, most_steps));
      },
      py::kw_only(), py::arg("block_bytes"), py::arg("capacities"), py::arg("most_steps"),
      "For each block the index of its device, in any order; None if no fit was found in so many steps "
      "(csrc/core/placement/partition.h).");
}

}  // namespace accelerate_cpp::bindings
