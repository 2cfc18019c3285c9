#include "bindings/interrupt_watch.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>

#include "core/base/threads.h"

namespace accelerate_cpp::bindings {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

// How long the main thread has to handle the signal by itself.
constexpr std::chrono::milliseconds kPatience{40};

struct sigaction python_action;
std::atomic<std::uint64_t> pressed{0};
std::atomic<std::uint64_t> answered{0};
std::atomic<Clock::rep> pressed_at{0};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<Clock::rep>::is_always_lock_free);

void on_interrupt(int signal) {
  pressed_at.store(Clock::now().time_since_epoch().count());
  pressed.fetch_add(1);
  python_action.sa_handler(signal);
}

// Runs in the main thread, once it executes Python code again.
int answer(void*) {
  answered.store(pressed.load());
  return 0;
}

bool python_is_in_charge() {
  const py::module_ signals = py::module_::import("signal");
  return signals.attr("getsignal")(SIGINT).is(signals.attr("default_int_handler"));
}

// Translated by torch and by us in the thread that waited, where the signal that is now answered would otherwise raise
// a second KeyboardInterrupt.
struct Interrupt : torch::PyTorchError {
  Interrupt() : PyTorchError("KeyboardInterrupt") {}

  PyObject* python_type() override {
    if (PyErr_CheckSignals() != 0) {
      PyErr_Clear();
    }
    return PyExc_KeyboardInterrupt;
  }
};

}  // namespace

void watch_interrupts() {
  const py::gil_scoped_acquire gil;
  struct sigaction current{};
  if (::sigaction(SIGINT, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0 ||
      current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN || current.sa_handler == on_interrupt ||
      !python_is_in_charge()) {
    return;
  }
  python_action = current;
  current.sa_handler = on_interrupt;
  ::sigaction(SIGINT, &current, nullptr);
}

void check_unanswered_interrupt() {
  const std::uint64_t latest = pressed.load();
  if (answered.load() >= latest) {
    return;
  }
  static std::atomic<std::uint64_t> asked{0};
  if (asked.exchange(latest) < latest) {
    Py_AddPendingCall(answer, nullptr);
  }
  if (Clock::now().time_since_epoch().count() - pressed_at.load() < Clock::duration(kPatience).count() ||
      !thread_sleeps(::getpid())) {  // the main thread's number, also in a process that another thread has forked
    return;
  }
  const py::gil_scoped_acquire gil;
  if (answered.load() < latest && python_is_in_charge()) {
    answered.store(latest);
    throw Interrupt();
  }
}

}  // namespace accelerate_cpp::bindings
