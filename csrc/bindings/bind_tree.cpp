#include "bindings/bindings.h"
#include "torch_bridge/tree.h"

namespace accelerate_cpp::bindings {

void bind_tree(py::module_& module) {
  module.def(
      "move_tree",
      [](const py::object& tree, const at::Device& device, bool non_blocking, const py::tuple& skip_keys) {
        PyObject* const moved = move_tree(tree.ptr(), {device, non_blocking, skip_keys.ptr()});
        if (moved == nullptr) {
          throw py::error_already_set();
        }
        return py::reinterpret_steal<py::object>(moved);
      },
      py::arg("tree"), py::arg("device"), py::arg("non_blocking"), py::arg("skip_keys"),
      "A tree of the same types with every tensor on the device (csrc/torch_bridge/tree.h).");
}

}  // namespace accelerate_cpp::bindings
