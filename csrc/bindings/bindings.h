// The parts of the module. Each function adds its names to the module it is given.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <vector>

#include "core/base/deadline.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {
class C10dBackend;
class Communicator;
}  // namespace accelerate_cpp::comm

namespace accelerate_cpp::bindings {

namespace py = pybind11;

void bind_amp(py::module_& module);
void bind_cuda(py::module_& module);
void bind_data(py::module_& module);
void bind_errors(py::module_& module);
void bind_comm(py::module_& module);
void bind_grad(py::module_& module);
void bind_hooks(py::module_& module);
void bind_hosts(py::module_& module);
void bind_offload(py::module_& module);
void bind_placement(py::module_& module);
void bind_shared_memory(py::module_& module);
void bind_tree(py::module_& module);
void bind_xla(py::module_& module);

// Lets Ctrl-C end a wait in C++: raises KeyboardInterrupt when a signal has arrived.
comm::InterruptProbe interrupt_probe();

// Inside a catch block of code that runs under autograd: throws the exception in flight as torch's python_error, whose
// Python type survives the engine.
void rethrow_for_autograd();

// What communicators ask of a Python program: interrupts, the place in the user's code, and the logger. A wait is
// reported after `warn_after`; never, when that is 0. All of it may be called in any thread, and while the interpreter
// ends.
comm::WaitHooks wait_hooks(std::chrono::milliseconds warn_after);

// `hooks` of a group of `size` ranks, which messages call by `numbers`, if there are any. Throws InvalidArgument unless
// there is one for each.
comm::WaitHooks with_numbers(comm::WaitHooks hooks, std::vector<int> numbers, int size);

// Collective: connects `size` ranks of this host that share `store`. Throws InvalidArgument where there is no shared
// memory, and what ShmCommunicator::connect throws.
std::shared_ptr<comm::Communicator> connect_within_host(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                        int size, Deadline deadline, const comm::WaitHooks& hooks);

// A communicator as a backend of torch.distributed. Its threads end before the interpreter does.
c10::intrusive_ptr<comm::C10dBackend> make_backend(std::shared_ptr<comm::Communicator> communicator,
                                                   std::chrono::milliseconds timeout);

}  // namespace accelerate_cpp::bindings
