// The backend for ranks on several hosts.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/base/error.h"
#include "core/comm/hierarchical.h"
#include "core/comm/host_layout.h"
#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/c10d_communicator.h"

namespace accelerate_cpp::bindings {
namespace {

using comm::C10dCommunicator;
using comm::C10dEngine;
using comm::Communicator;
using comm::HostLayout;
using std::chrono::milliseconds;
using StorePointer = C10dEngine::StorePointer;

std::shared_ptr<Communicator> connect_inside(const StorePointer& store, const HostLayout& layout, int rank,
                                             Deadline deadline, const comm::WaitHooks& hooks) {
  const int host = layout.host_of(rank);
  const int size = static_cast<int>(layout.ranks_of(host).size());
  const auto own = c10::make_intrusive<::c10d::PrefixStore>("host" + std::to_string(host), store);
  return connect_within_host(own, layout.index_within_host(rank), size, deadline, hooks);
}

std::shared_ptr<Communicator> connect_hosts(const StorePointer& store, int rank, const std::vector<int>& hosts,
                                            milliseconds timeout, milliseconds warn_after,
                                            const C10dEngine::Connect& connect, std::vector<int> numbers) {
  const HostLayout layout(hosts);
  const comm::WaitHooks hooks = wait_hooks(warn_after);  // inside and between the hosts, ranks have other numbers
  const comm::WaitHooks of_all = with_numbers(hooks, std::move(numbers), layout.size());
  const auto connect_far = [&](const std::string& name, int own_rank, int size) {
    const C10dEngine::Place place{name, own_rank, size, of_all.number_of(rank)};
    // Hierarchical has compared the calls of all ranks before it gets here.
    return std::make_shared<C10dCommunicator>(std::make_shared<C10dEngine>(connect, store, place, hooks), false);
  };
  comm::Hierarchical::Parts parts;
  parts.inside = connect_inside(store, layout, rank, Deadline::after(timeout), hooks);
  parts.everyone = connect_far("everyone", rank, layout.size());
  if (layout.num_hosts() == layout.size()) {
    parts.rail = parts.everyone;
  } else if (layout.is_on_rail(rank)) {
    const std::string name = "rail" + std::to_string(layout.index_within_host(rank));
    parts.rail = connect_far(name, layout.host_of(rank), layout.num_hosts());
  }
  return std::make_shared<comm::Hierarchical>(layout, std::move(parts), of_all);
}

// `connect` for threads that do not hold the interpreter lock. Never released: an owner may drop it while the
// interpreter ends.
C10dEngine::Connect without_lock(const py::function& connect) {
  PyObject* const function = py::function(connect).release().ptr();
  return [function](const StorePointer& store, int rank, int size) {
    const py::gil_scoped_acquire gil;
    return py::handle(function)(store, rank, size).cast<c10::intrusive_ptr<::c10d::Backend>>();
  };
}

}  // namespace

void bind_hosts(py::module_& module) {
  module.def(
      "create_hierarchical_backend",
      [](const StorePointer& store, int rank, int size, const std::vector<int>& hosts, milliseconds timeout,
         const py::function& connect, milliseconds warn_after, std::vector<int> numbers) {
        if (static_cast<std::size_t>(size) != hosts.size()) {
          throw InvalidArgument("expected the host of each of " + std::to_string(size) + " ranks, found " +
                                std::to_string(hosts.size()));
        }
        const C10dEngine::Connect connect_engine = without_lock(connect);
        const py::gil_scoped_release release;
        return make_backend(connect_hosts(store, rank, hosts, timeout, warn_after, connect_engine, std::move(numbers)),
                            timeout);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("hosts"), py::arg("timeout"), py::arg("connect"),
      py::arg("warn_after") = milliseconds(30000), py::arg("numbers") = std::vector<int>(),
      "Collective: connects the ranks that share `store`, rank r on host hosts[r], through shared memory within each "
      "host and through what connect(store, rank, size) returns, a torch backend, between them. Messages call ranks by "
      "their `numbers`, if there are any.");
}

}  // namespace accelerate_cpp::bindings
