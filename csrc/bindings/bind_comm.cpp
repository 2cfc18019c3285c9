#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/solo.h"
#include "core/comm/waiting_time.h"
#include "torch_bridge/c10d_arguments.h"
#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/c10d_reduction.h"
#include "torch_bridge/c10d_store.h"
#include "torch_bridge/tensor_view.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shm_communicator.h"
#endif

namespace accelerate_cpp::bindings {

std::shared_ptr<comm::Communicator> connect_within_host(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                        int size, Deadline deadline, const comm::WaitHooks& hooks) {
  if (size == 1) {
    return std::make_shared<comm::SoloCommunicator>();
  }
#if defined(ACCELERATE_HAS_SHM)
  comm::C10dStore adapted(store, hooks.probe);
  return comm::ShmCommunicator::connect(adapted, rank, size, deadline, hooks);
#else
  (void)store, (void)rank, (void)deadline, (void)hooks;
  throw InvalidArgument("shared-memory collectives exist on Linux only; use the gloo backend here");
#endif
}

namespace {

using comm::C10dBackend;
using comm::Communicator;
using std::chrono::milliseconds;

void all_reduce(Communicator& communicator, const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                milliseconds timeout) {
  Contiguous data(tensor);
  communicator.all_reduce(data.load(), comm::reduction_of(op, tensor.is_complex()),
                          comm::Call(Deadline::after(timeout), comm::shape_of(tensor)));
  data.store();
}

void broadcast_tensors(Communicator& communicator, const std::vector<at::Tensor>& tensors, int root,
                       milliseconds timeout) {
  for (const at::Tensor& tensor : tensors) {
    Contiguous data(tensor, Use::kMove);
    communicator.broadcast(data.load(), root, comm::Call(Deadline::after(timeout), comm::shape_of(tensor)));
    data.store();
  }
}

std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> traffic_of(const C10dBackend& backend) {
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> found;
  for (const auto& [kind, total] : backend.traffic().totals()) {
    found.emplace(kind, std::pair(total.operations, total.size_bytes));
  }
  return found;
}

at::Tensor window(Communicator& communicator, std::size_t size_bytes, milliseconds timeout) {
  const std::shared_ptr<comm::Buffer> buffer = communicator.window(size_bytes, comm::Call(Deadline::after(timeout)));
  return at::from_blob(
      buffer->data(), {static_cast<std::int64_t>(size_bytes)}, [buffer](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

}  // namespace

void bind_comm(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<Communicator, std::shared_ptr<Communicator>>(
      module, "Communicator", "Collective operations of a fixed set of ranks (csrc/core/comm/communicator.h).")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("interruptions", &Communicator::interruptions,
                             "How many collectives have ended in an error that all ranks raised alike.")
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op"), py::arg("timeout"), release,
           "Reduces the tensors of all ranks into that of every rank, in place, without what torch.distributed does "
           "around it.")
      .def("broadcast_tensors", &broadcast_tensors, py::arg("tensors"), py::arg("root"), py::arg("timeout"), release,
           "Copies the tensors of rank `root` into those of every rank, in place.")
      .def(
          "meet",
          [](Communicator& communicator, const std::string& topic, milliseconds timeout) {
            return communicator.meet(topic, comm::Call(Deadline::after(timeout)));
          },
          py::arg("topic"), py::arg("timeout"), release,
          "The ranks that call this with the same topic, once it is known of all whether they do. A rank that is in "
          "another collective, or has left, does not, and notices nothing; one that has died raises PeerLost.")
      .def("someone_has_left", &Communicator::someone_has_left, release,
           "Whether some rank is known to have left in good order. Does not wait.")
      .def(
          "barrier",
          [](Communicator& communicator, milliseconds timeout) {
            communicator.barrier(comm::Call(Deadline::after(timeout)));
          },
          py::arg("timeout"), release, "Returns when every rank has entered it.")
      .def("window", &window, py::arg("size_bytes"), py::arg("timeout"), release,
           "Collective: zeros of uint8 in memory that every rank, all on this host, has mapped; gone with its last "
           "tensor on any of them. Allocated in full: SystemError on all ranks where there is not enough.")
      .def(
          "withdraw",
          [](Communicator& communicator, const std::string& reason, milliseconds timeout) {
            communicator.withdraw(reason, comm::Call(Deadline::after(timeout)));
          },
          py::arg("reason"), py::arg("timeout"), release,
          "Takes no part in the collective that the others are in or call next, which raises PeerLost with the reason "
          "on them. Ends the communicator unless it can_withdraw.")
      .def_property_readonly("can_withdraw", &Communicator::can_withdraw)
      .def("abort", &Communicator::abort, py::arg("reason"), release,
           "Makes current and later operations of every rank raise PeerLost with the reason.");

  py::class_<C10dBackend, ::c10d::Backend, c10::intrusive_ptr<C10dBackend>>(
      module, "C10dBackend", "A communicator as a torch.distributed backend.")
      .def_property_readonly("communicator", &C10dBackend::communicator)
      .def_property_readonly("timeout", &C10dBackend::timeout)
      .def_property_readonly("traffic", &traffic_of,
                             "What has been issued through the backend so far: by the kind of operation, such as "
                             "all_reduce, how many, and the bytes that this rank put in (csrc/core/comm/traffic.h).");

  module.def(
      "create_backend",
      [](const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, milliseconds timeout,
         milliseconds warn_after, std::vector<int> numbers) {
        const comm::WaitHooks hooks = with_numbers(wait_hooks(warn_after), std::move(numbers), size);
        return make_backend(connect_within_host(store, rank, size, Deadline::after(timeout), hooks), timeout);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::arg("warn_after") = milliseconds(30000), py::arg("numbers") = std::vector<int>(), release,
      "Collective: connects the ranks that share `store`, all on this host, and returns the backend. Waits are "
      "reported after `warn_after`; 0 means never. Messages call ranks by their `numbers`, if there are any.");
  module.def("time_waited", &comm::time_waited,
             "How long the calling thread has waited for other ranks in all, over all communicators of this package.");
  module.def("reduce_instruction_set", &comm::reduce_instruction_set,
             "The vector instructions that reductions use: avx512, avx2 or portable.");
}

}  // namespace accelerate_cpp::bindings
