#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/base/error.h"
#include "torch_bridge/c10d_store.h"
#include "torch_bridge/device_kernels.h"
#include "torch_bridge/gradient_reducers.h"
#include "torch_bridge/nccl_device_group.h"
#include "torch_bridge/scattered_reducer.h"

namespace accelerate_cpp::bindings {

namespace {

// Python functions are called and released with the interpreter's lock held.
std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

grad::CommHook comm_hook(const py::function& hook) {
  return [hook = shared(hook)](const ::c10d::GradBucket& bucket) -> std::function<at::Tensor()> {
    const py::gil_scoped_acquire gil;
    return [future = shared((*hook)(bucket))] {
      const py::gil_scoped_acquire held;
      return future->attr("wait")().cast<at::Tensor>();
    };
  };
}

using Group = c10::intrusive_ptr<::c10d::ProcessGroup>;

// The end of a group awaits threads that may need the interpreter's lock, or other ranks, so it must not hold it.
template <class Pointer>
std::shared_ptr<Pointer> ended_without_lock(Pointer pointer) {
  return {new Pointer(std::move(pointer)), [](Pointer* held) {
            if (PyGILState_Check() != 0) {
              const py::gil_scoped_release release;
              delete held;
            } else {
              delete held;
            }
          }};
}

// What Python holds of a communicator.
struct HeldNccl {
  std::shared_ptr<comm::NcclComm> comm;
};

// Called without the interpreter's lock.
HeldNccl connect_nccl(const Group& group, const c10::Device& device, std::chrono::milliseconds timeout) {
  comm::C10dStore store(group->getStore(), interrupt_probe());
  const auto held = ended_without_lock(comm::NcclComm::connect(store, group->getRank(), group->getSize(),
                                                               grad::nccl_on(device), Deadline::after(timeout),
                                                               {"accelerate_cpp/nccl", timeout, interrupt_probe()}));
  return {{held, held->get()}};
}

grad::DeviceGroup device_group(const Group& group, std::shared_ptr<const cuda::LoadedSlotKernels> kernels) {
  const std::shared_ptr<Group> held = ended_without_lock(group);
  const auto sum = [held](const at::Tensor& bucket) -> std::function<void()> {
    std::vector<at::Tensor> tensors{bucket};
    return [work = (*held)->allreduce(tensors)] { work->wait(); };
  };
  return {sum, [held] { (*held)->abort(); }, std::move(kernels)};
}

// Called without the interpreter's lock.
std::shared_ptr<const cuda::LoadedSlotKernels> kernels_or_warning(const c10::Device& device) {
  try {
    return grad::slot_kernels_on(device);
  } catch (const Error& error) {
    const std::string warning =
        "the gradient kernels are not available, and torch's operations serve instead: " + std::string(error.what());
    const py::gil_scoped_acquire gil;
    if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) {
      throw py::error_already_set();
    }
    return nullptr;
  }
}

void bind_reducer(py::module_& module) {
  using grad::GradientReducer;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<GradientReducer, std::shared_ptr<GradientReducer>>(
      module, "GradientReducer", "Averages gradients during backward (csrc/torch_bridge/gradient_reducer.h).")
      .def(py::init([](std::shared_ptr<comm::Communicator> communicator,
                       const std::vector<std::tuple<std::string, at::Tensor, bool>>& parameters,
                       std::vector<at::Tensor> left_out, std::size_t first_bucket_cap_bytes,
                       std::size_t bucket_cap_bytes, std::chrono::milliseconds timeout,
                       const std::optional<Group>& group, bool device_kernels, const HeldNccl* nccl) {
             auto kernels = group && device_kernels && !parameters.empty()
                                ? kernels_or_warning(std::get<1>(parameters.front()).device())
                                : nullptr;
             std::vector<grad::ReducedParameter> reduced;
             for (const auto& [name, tensor, sparse_gradient] : parameters) {
               reduced.push_back({name, tensor, sparse_gradient});
             }
             grad::ReducerOptions options{first_bucket_cap_bytes, bucket_cap_bytes, timeout, {}};
             if (nccl != nullptr) {
               const int index = nccl->comm->context().device->index();
               options.device_group = grad::nccl_device_group(
                   nccl->comm, grad::current_stream_of_torch({c10::kCUDA, static_cast<c10::DeviceIndex>(index)}),
                   std::move(kernels));
             } else if (group) {
               options.device_group = device_group(*group, std::move(kernels));
             }
             return GradientReducer::create(std::move(communicator), std::move(reduced), std::move(left_out),
                                            std::move(options), rethrow_for_autograd);
           }),
           py::arg("communicator"), py::arg("parameters"), py::arg("left_out"), py::arg("first_bucket_cap_bytes"),
           py::arg("bucket_cap_bytes"), py::arg("timeout"), py::arg("device_group") = std::nullopt,
           py::arg("device_kernels") = false, py::arg("nccl") = nullptr, release)
      .def_property("synchronizing", &GradientReducer::synchronizing, &GradientReducer::set_synchronizing,
                    "Whether backward passes average gradients or leave them local.")
      .def("may_lack_parameters", &GradientReducer::may_lack_parameters,
           "Whether the model may have parameters by now that require a gradient and are not averaged.")
      .def("set_weight", &GradientReducer::set_weight, py::arg("weight"),
           "What the gradients of this rank weigh in the next averaging backward pass.")
      .def("take_part_without_gradients", &GradientReducer::take_part_without_gradients, release,
           "Takes part in an averaging backward pass of the other ranks, who have weights, with nothing of its own.")
      .def(
          "register_comm_hook",
          [](GradientReducer& reducer, const py::function& hook, const std::optional<Group>& group) {
            reducer.register_comm_hook(comm_hook(hook), group ? device_group(*group, nullptr).abort : nullptr);
          },
          py::arg("hook"), py::arg("group") = std::nullopt,
          "Collective. Lets hook(torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor] average buckets. "
          "A "
          "failed backward pass ends `group`, in which the hook's collectives are, and the communicator.")
      .def_property_readonly("bucket_sizes_bytes", &GradientReducer::bucket_sizes_bytes)
      .def("expect_backward", &GradientReducer::expect_backward,
           "The caller says how the next backward pass ends, by backward_ended() or backward_failed().")
      .def("backward_ended", &GradientReducer::backward_ended, release, "Returns when .grad holds the averages.")
      .def("backward_failed", &GradientReducer::backward_failed, py::arg("reason"), release,
           "The other ranks raise PeerLost with the reason; gradients are cleared, and training can go on.");
}

grad::BackendPointer on_cpu(const std::optional<Group>& group) {
  return group ? (*group)->getBackend(c10::DeviceType::CPU) : grad::BackendPointer();
}

void bind_scattered_reducer(py::module_& module) {
  using grad::ScatteredReducer;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<ScatteredReducer, std::shared_ptr<ScatteredReducer>>(
      module, "ScatteredReducer",
      "Averages gradients of whole weights into the rows of each rank (csrc/torch_bridge/scattered_reducer.h).")
      .def(py::init([](const Group& ranks, const std::optional<Group>& replicas,
                       const std::vector<std::pair<std::string, at::Tensor>>& weights, std::size_t bucket_bytes,
                       bool overlaps, const py::function& begin) {
             std::vector<grad::ScatteredWeight> scattered;
             for (const auto& [name, whole] : weights) {
               scattered.push_back({name, whole});
             }
             const auto call = [begin = shared(begin)] {
               const py::gil_scoped_acquire gil;
               (*begin)();
             };
             const py::gil_scoped_release unlocked;
             return ScatteredReducer::create(on_cpu(ranks), on_cpu(replicas), std::move(scattered),
                                             {bucket_bytes, overlaps}, call, rethrow_for_autograd);
           }),
           py::arg("ranks"), py::arg("replicas"), py::arg("weights"), py::arg("bucket_bytes"), py::arg("overlaps"),
           py::arg("begin"))
      .def_property("synchronizing", &ScatteredReducer::synchronizing, &ScatteredReducer::set_synchronizing,
                    "Whether backward passes average gradients or leave them local.")
      .def("expect", &ScatteredReducer::expect,
           "The caller says how the next backward pass ends; else autograd's pass does.")
      .def(
          "begin",
          [](ScatteredReducer& reducer, const std::vector<std::pair<at::Tensor, bool>>& rows, bool deferred) {
            std::vector<grad::RowsOfWeight> all;
            for (const auto& [tensor, adds] : rows) {
              all.push_back({tensor, adds});
            }
            const py::gil_scoped_release unlocked;
            reducer.begin(std::move(all), deferred);
          },
          py::arg("rows"), py::arg("deferred"),
          "A pass begins. Of each weight, the memory for the averages of this rank, and whether they are added to it.")
      .def("finish", &ScatteredReducer::finish, release,
           "Returns when the averages are there: for each weight, whether some rank has a gradient for it.")
      .def("fail", &ScatteredReducer::fail, py::arg("reason"), release,
           "The other ranks raise PeerLost with the reason.");
}

void bind_nccl(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<HeldNccl>(module, "NcclComm", "NCCL for gradient buckets of one GPU (csrc/core/comm/nccl/nccl_comm.h).")
      .def(py::init(&connect_nccl), py::arg("group"), py::arg("device"), py::arg("timeout"),
           "Collective: connects the ranks of the process group, on whose store they find each other.", release);
  module.def(
      "open_nccl", [](const c10::Device& device) { grad::nccl_on(device); }, py::arg("device"), release,
      "Throws where NcclComm finds no libraries for the device.");
}

}  // namespace

void bind_grad(py::module_& module) {
  bind_nccl(module);
  bind_reducer(module);
  bind_scattered_reducer(module);
  module.def("note_registration", &grad::note_registration,
             "To be called when some module gets a parameter or a submodule.");
  module.def(
      "have_gradients",
      [](const std::vector<at::Tensor>& parameters) {
        return std::any_of(parameters.begin(), parameters.end(),
                           [](const at::Tensor& parameter) { return parameter.grad().defined(); });
      },
      py::arg("parameters"),
      "Whether one of these parameters has a gradient; p.grad is not None, without taking hold of it, as that would "
      "take away what is known of it.");
  module.def(
      "known_statistics",
      [](const std::vector<at::Tensor>& parameters) {
        std::vector<std::optional<std::pair<double, std::uint64_t>>> all;
        for (const std::optional<amp::GradientStatistics>& one : grad::known_statistics(parameters)) {
          all.push_back(one ? std::optional(std::pair(one->sum_of_squares, one->num_non_finite)) : std::nullopt);
        }
        return all;
      },
      py::arg("parameters"),
      "The sum of squares and the number of non-finite elements of the gradient of each parameter, where the reduction "
      "has measured it and nobody can have changed it since. Looking at p.grad in Python counts as a change.");
  module.def("known_device_statistics", &grad::known_device_statistics, py::arg("parameters"),
             "The same where their accelerator has them: of each parameter one tensor, of two elements, which the host "
             "has not waited for.");
}

}  // namespace accelerate_cpp::bindings
