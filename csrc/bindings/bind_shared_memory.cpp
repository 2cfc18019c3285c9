#include <cstddef>
#include <memory>

#include "bindings/bindings.h"
#include "core/base/error.h"
#include "torch_bridge/shared_empty.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/segment.h"
#endif

namespace accelerate_cpp::bindings {

void bind_shared_memory(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  module.def("shared_empty", &comm::shared_empty, py::arg("size"), py::arg("dtype"), release,
             "A CPU tensor of zeros on which collectives need no staging copy (csrc/torch_bridge/shared_empty.h).");
  module.def("is_shared_tensor", &comm::is_shared_tensor, py::arg("tensor"), release,
             "Whether the tensor lies in memory from shared_empty().");
#if defined(ACCELERATE_HAS_SHM)
  using comm::Segment;
  py::class_<Segment, std::shared_ptr<Segment>>(
      module, "Segment", py::buffer_protocol(),
      "A file in memory without a name, which this process has mapped (csrc/core/comm/shm/segment.h).")
      .def_property_readonly("descriptor", &Segment::descriptor)
      .def_buffer([](Segment& segment) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(segment.data()),
                               static_cast<py::ssize_t>(segment.size_bytes()));
      });
#endif
  module.def(
      "create_segment",
      [](std::size_t size_bytes) {
#if defined(ACCELERATE_HAS_SHM)
        return Segment::create(size_bytes);
#else
        (void)size_bytes;
        throw InvalidArgument("processes share memory on Linux only");
#endif
      },
      py::arg("size_bytes"), release,
      "Zero-filled memory of at least `size_bytes`, allocated in full, for processes of this host to share.");
}

}  // namespace accelerate_cpp::bindings
