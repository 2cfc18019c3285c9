#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/offload/read_ahead.h"
#include "torch_bridge/ahead_copies.h"

namespace accelerate_cpp::bindings {
namespace {

using Ranges = std::vector<std::vector<std::pair<std::uintptr_t, std::size_t>>>;

std::unique_ptr<offload::ReadAhead> read_ahead(const Ranges& units, std::size_t window_bytes) {
  std::vector<std::vector<offload::MappedRange>> ranges(units.size());
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    for (const auto& [address, bytes] : units[unit]) {
      ranges[unit].push_back({address, bytes});
    }
  }
  return std::make_unique<offload::ReadAhead>(std::move(ranges), window_bytes);
}

std::unique_ptr<offload::AheadCopies> ahead_copies(
    const std::vector<std::vector<std::pair<at::Tensor, at::ScalarType>>>& units, const at::Device& device,
    std::size_t window_bytes) {
  std::vector<std::vector<offload::Weight>> weights(units.size());
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    for (const auto& [tensor, dtype] : units[unit]) {
      weights[unit].push_back({tensor, dtype});
    }
  }
  return std::make_unique<offload::AheadCopies>(std::move(weights), device, window_bytes);
}

}  // namespace

void bind_offload(py::module_& module) {
  using offload::AheadCopies;
  using offload::ReadAhead;
  py::class_<AheadCopies>(module, "AheadCopies",
                          "Copies weights to an accelerator before they are needed (csrc/torch_bridge/ahead_copies.h).")
      .def(py::init(&ahead_copies), py::kw_only(), py::arg("units"), py::arg("device"), py::arg("window_bytes"),
           "`units`: of each its tensors, and the dtypes that they are wanted in.")
      .def("take", &AheadCopies::take, py::arg("unit"), py::call_guard<py::gil_scoped_release>(),
           "The copies of `unit`, which is needed now; empty if there are none.")
      .def("await_idle", &AheadCopies::await_idle, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("bytes_ahead", &AheadCopies::bytes_ahead);
  py::class_<ReadAhead>(module, "ReadAhead",
                        "Reads weights from mapped files before they are needed (csrc/core/offload/read_ahead.h).")
      .def(py::init(&read_ahead), py::kw_only(), py::arg("units"), py::arg("window_bytes"),
           "`units`: of each the address and bytes of its tensors.")
      .def("arrive", &ReadAhead::arrive, py::arg("unit"), "`unit` is read from now on; does not wait.")
      .def("await_idle", &ReadAhead::await_idle, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("bytes_ahead", &ReadAhead::bytes_ahead);
}

}  // namespace accelerate_cpp::bindings
