// Translates C++ errors into the classes of accelerate_cpp.errors.
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "bindings/bindings.h"
#include "core/base/error.h"

namespace accelerate_cpp::bindings {
namespace {

// Never released: exceptions may be translated while the interpreter shuts down.
PyObject* error_class(const char* name) {
  return py::module_::import("accelerate_cpp.errors").attr(name).cast<py::object>().release().ptr();
}

struct ErrorClasses {
  PyObject* invalid_argument = error_class("InvalidArgument");
  PyObject* timeout = error_class("Timeout");
  PyObject* peer_lost = error_class("PeerLost");
  PyObject* mismatched_collective = error_class("MismatchedCollective");
  PyObject* system_failure = error_class("SystemFailure");
  PyObject* internal_error = error_class("InternalError");
};

const ErrorClasses& classes() {
  static const ErrorClasses* const instance = new ErrorClasses;
  return *instance;
}

// Sets the Python error for one of ours and returns true; false for any other exception.
bool set_python_error(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const InvalidArgument& error) {
    PyErr_SetString(classes().invalid_argument, error.what());
  } catch (const Timeout& error) {
    PyErr_SetString(classes().timeout, error.what());
  } catch (const PeerLost& error) {
    PyErr_SetString(classes().peer_lost, error.what());
  } catch (const MismatchedCollective& error) {
    PyErr_SetString(classes().mismatched_collective, error.what());
  } catch (const SystemFailure& error) {
    const py::tuple arguments = py::make_tuple(error.error_number(), error.what());
    PyErr_SetObject(classes().system_failure, arguments.ptr());
  } catch (const InternalError& error) {
    PyErr_SetString(classes().internal_error, error.what());
  } catch (...) {
    return false;
  }
  return true;
}

// torch's carrier of a Python exception, with a message that names its type, since other ranks are sent that message.
struct NamedPythonError : python_error {
  NamedPythonError() {
    persist();
    const std::string name = reinterpret_cast<PyTypeObject*>(type)->tp_name;
    const bool has_text = !message.empty() && message != "python_error";
    message = has_text ? name + ": " + message : name;
  }
};

[[noreturn]] void throw_python_error() {
  throw NamedPythonError();  // thrown by value, as torch does
}

}  // namespace

void bind_errors(py::module_&) {
  classes();
  // Registered for every module that shares torch's copy of pybind11, since torch.distributed calls into our backend.
  py::register_exception_translator([](std::exception_ptr exception) {
    if (exception && !set_python_error(exception)) {
      try {
        std::rethrow_exception(exception);
      } catch (torch::PyTorchError& error) {
        PyErr_SetString(error.python_type(), error.what());
      }
    }
  });
}

comm::InterruptProbe interrupt_probe() {
  return [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw_python_error();
    }
  };
}

void rethrow_for_autograd() {
  const std::exception_ptr exception = std::current_exception();
  const py::gil_scoped_acquire gil;
  if (set_python_error(exception)) {
    throw_python_error();
  }
  std::rethrow_exception(exception);
}

}  // namespace accelerate_cpp::bindings
