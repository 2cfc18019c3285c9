// The parts of the module. Each function adds its names to the module it is given.
#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "core/comm/options.h"

namespace accelerate_cpp::bindings {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_comm(py::module_& module);
void bind_grad(py::module_& module);
void bind_placement(py::module_& module);
void bind_tree(py::module_& module);

// Lets Ctrl-C end a wait in C++: raises KeyboardInterrupt when a signal has arrived.
comm::InterruptProbe interrupt_probe();

// Inside a catch block of code that runs under autograd: throws the exception in flight as torch's python_error, whose
// Python type survives the engine.
void rethrow_for_autograd();

}  // namespace accelerate_cpp::bindings
