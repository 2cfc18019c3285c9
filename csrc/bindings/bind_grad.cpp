#include <chrono>
#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "torch_bridge/gradient_reducer.h"

namespace accelerate_cpp::bindings {

void bind_grad(py::module_& module) {
  using grad::GradientReducer;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<GradientReducer, std::shared_ptr<GradientReducer>>(
      module, "GradientReducer", "Averages gradients during backward (csrc/torch_bridge/gradient_reducer.h).")
      .def(py::init([](std::shared_ptr<comm::Communicator> communicator, std::vector<at::Tensor> parameters,
                       std::size_t first_bucket_cap_bytes, std::size_t bucket_cap_bytes,
                       std::chrono::milliseconds timeout) {
             return GradientReducer::create(std::move(communicator), std::move(parameters),
                                            {first_bucket_cap_bytes, bucket_cap_bytes, timeout}, rethrow_for_autograd);
           }),
           py::arg("communicator"), py::arg("parameters"), py::arg("first_bucket_cap_bytes"),
           py::arg("bucket_cap_bytes"), py::arg("timeout"), release)
      .def_property("synchronizing", &GradientReducer::synchronizing, &GradientReducer::set_synchronizing,
                    "Whether backward passes average gradients or leave them local.")
      .def_property_readonly("bucket_sizes_bytes", &GradientReducer::bucket_sizes_bytes)
      .def("abort", &GradientReducer::abort, py::arg("reason"), release,
           "After a backward pass that raised: the other ranks raise PeerLost with the reason.");
}

}  // namespace accelerate_cpp::bindings
