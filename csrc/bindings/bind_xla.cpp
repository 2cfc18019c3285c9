// What accelerate_cpp.jax needs of XLA's custom calls: the handlers, and numbers for groups of processes.
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "core/comm/communicator.h"
#include "xla_calls/groups.h"
#if defined(ACCELERATE_HAS_XLA)
#include "xla_calls/handlers.h"
#endif

namespace accelerate_cpp::bindings {
namespace {

// What a wait hook has thrown. XLA keeps only the text, so a signal that has been noticed here is raised once more for
// the main thread.
std::string described(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const python_error&) {
    PyErr_SetInterrupt();
    return "KeyboardInterrupt: a collective was interrupted";
  } catch (const torch::PyTorchError& error) {
    return std::string("KeyboardInterrupt: ") + error.what();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "InternalError: an unknown exception in a collective";
  }
}

}  // namespace

void bind_xla(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  module.def(
      "register_xla_group",
      [](std::shared_ptr<comm::Communicator> communicator, std::chrono::milliseconds timeout) {
        return xla_calls::register_group(
            std::make_shared<xla_calls::Group>(std::move(communicator), timeout, described));
      },
      py::arg("communicator"), py::arg("timeout"), release,
      "A number by which XLA's custom calls find the communicator (csrc/xla_calls/groups.h).");
  module.def("forget_xla_group", &xla_calls::forget_group, py::arg("number"), release,
             "Later calls of programs with this number raise InvalidArgument.");
  module.def(
      "xla_handlers",
      [] {
        py::dict found;
#if defined(ACCELERATE_HAS_XLA)
        for (const xla_calls::NamedHandler& one : xla_calls::handlers()) {
          found[one.name] = py::capsule(one.handler);
        }
#endif
        return found;
      },
      "The handlers of XLA's custom calls as capsules, by name (csrc/xla_calls/handlers.h); none where the module was "
      "built without jaxlib.");
}

}  // namespace accelerate_cpp::bindings
