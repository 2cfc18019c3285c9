#include "bindings/bindings.h"
#include "torch_bridge/shared_empty.h"

namespace accelerate_cpp::bindings {

void bind_shared_memory(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  module.def("shared_empty", &comm::shared_empty, py::arg("size"), py::arg("dtype"), release,
             "A CPU tensor of zeros on which collectives need no staging copy (csrc/torch_bridge/shared_empty.h).");
  module.def("is_shared_tensor", &comm::is_shared_tensor, py::arg("tensor"), release,
             "Whether the tensor lies in memory from shared_empty().");
}

}  // namespace accelerate_cpp::bindings
