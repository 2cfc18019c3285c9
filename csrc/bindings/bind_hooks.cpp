// What communicators and backends ask of the Python program around them.
#include <pybind11/gil_safe_call_once.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interrupt_watch.h"
#include "core/base/background.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "torch_bridge/c10d_backend.h"

namespace accelerate_cpp::bindings {
namespace {

using comm::C10dBackend;
using std::chrono::milliseconds;

// Once the interpreter is ending, a thread that asks for its lock never returns.
bool interpreter_lives() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

bool is_python_thread() {
  return PyGILState_GetThisThreadState() != nullptr;
}

std::string call_site() {
  if (!interpreter_lives()) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_error;
  try {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> function;
    return function
        .call_once_and_store_result(
            [] { return py::object(py::module_::import("accelerate_cpp.comm.call_site").attr("call_site")); })
        .get_stored()()
        .cast<std::string>();
  } catch (const std::exception&) {
    return {};  // the place is only a detail of another message
  }
}

void warn(const std::string& sentence) {
  if (!interpreter_lives()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  const py::error_scope keep_error;
  try {
    py::module_::import("logging").attr("getLogger")("accelerate_cpp.comm").attr("warning")("%s", sentence);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a warning of accelerate_cpp.comm");
  }
}

std::atomic<bool> program_is_ending{false};
thread_local bool ends_program = false;

// A thread of Python that still waits when the program ends must not return: whoever called into C++ would take the
// interpreter's lock, and an interpreter that is ending makes that the end of the thread, which in a destructor is
// std::terminate. It stays until the process is gone, as all daemon threads do.
void stay_if_program_ends() {
  if (program_is_ending && !ends_program && is_python_thread()) {
    while (true) {
      ::pause();
    }
  }
}

void rethrow() {
  stay_if_program_ends();
  if (!interpreter_lives()) {
    throw;
  }
  rethrow_for_autograd();
}

// All existing backends. Weak references would keep their memory, and with it their place in the group, alive.
struct Backends {
  std::mutex mutex;
  std::set<C10dBackend*> all;
};

Backends& backends() {
  static Backends* const instance = new Backends;  // never destroyed: used while the interpreter ends
  return *instance;
}

void remember(C10dBackend& backend) {
  const std::lock_guard lock(backends().mutex);
  backends().all.insert(&backend);
}

void forget(C10dBackend& backend) {
  const std::lock_guard lock(backends().mutex);
  backends().all.erase(&backend);
}

// "its program ended with ValueError: bad value"; empty without an error.
std::string reason_of(const py::object& error) {
  if (error.is_none()) {
    return "";
  }
  const std::string kind = py::str(py::type::of(error).attr("__name__"));
  const std::string text = py::str(error);
  return "its program ended with " + kind + (text.empty() ? "" : ": " + text.substr(0, text.find('\n')));
}

// Our threads, even those of backends that are gone, may need the interpreter, which is about to end.
void leave_groups(const py::object& error) {
  const std::string reason = reason_of(error);
  const py::gil_scoped_release release;
  ends_program = true;
  program_is_ending = true;
  {
    const std::lock_guard lock(backends().mutex);  // keeps all of them alive meanwhile
    for (C10dBackend* const backend : backends().all) {
      backend->leave(reason);
    }
  }
  await_background_threads();
}

// A thread of Gloo lets go of an operation, and with it of Python objects, after it has told that the operation is
// done. One that is then still about to ask for the interpreter ends the process by SIGABRT.
void await_threads_of_gloo() {
  const py::gil_scoped_release release;
  await_sleep_of_threads("pt_gloo_runloop", std::chrono::seconds(5));
}

void leave_at_exit() {
  leave_groups(py::getattr(py::module_::import("sys"), "last_value", py::none()));  // what ended the program
  await_threads_of_gloo();
}

// Python's handlers cannot change the status of the process, and only the C library knows what it will be.
void fail_at_exit() {
#ifdef __GLIBC__
  on_exit(
      [](int status, void*) {
        if (status == 0) {
          std::fflush(nullptr);
          _exit(1);
        }
      },
      nullptr);
#else
  std::atexit([] {
    std::fflush(nullptr);
    _exit(1);
  });
#endif
}

}  // namespace

comm::WaitHooks with_numbers(comm::WaitHooks hooks, std::vector<int> numbers, int size) {
  if (!numbers.empty() && numbers.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgument("expected a number for each of " + std::to_string(size) + " ranks, found " +
                          std::to_string(numbers.size()));
  }
  hooks.numbers = std::move(numbers);
  return hooks;
}

comm::WaitHooks wait_hooks(milliseconds warn_after) {
  comm::WaitHooks hooks;
  hooks.probe = [probe = interrupt_probe()] {
    if (!interpreter_lives()) {
      return;
    }
    if (program_is_ending && !ends_program) {
      throw PeerLost("the process ended while an asynchronous operation was under way");
    }
    if (is_python_thread()) {
      probe();
    } else {
      check_unanswered_interrupt();
    }
  };
  hooks.call_site = call_site;
  hooks.warn = warn;
  hooks.warn_after = warn_after.count() == 0 ? milliseconds(std::chrono::hours(24 * 3650)) : warn_after;
  return hooks;
}

c10::intrusive_ptr<C10dBackend> make_backend(std::shared_ptr<comm::Communicator> communicator, milliseconds timeout) {
  watch_interrupts();
  const comm::WaitHooks hooks = wait_hooks(milliseconds(0));
  return c10::make_intrusive<C10dBackend>(std::move(communicator), "shm", timeout,
                                          comm::BackendHooks{hooks.probe, hooks.call_site, rethrow, remember, forget});
}

void bind_hooks(py::module_& module) {
  py::module_::import("atexit").attr("register")(py::cpp_function(leave_at_exit));
  module.def("leave_groups", leave_groups, py::arg("error"),
             "Tells the other ranks of all groups that this one takes part no more, as its program has ended: with "
             "`error`, or in good order if it is None.");
  module.def("fail_at_exit", fail_at_exit, "Lets the process that is about to end in good order end with status 1.");
}

}  // namespace accelerate_cpp::bindings
