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
  const std::vector<int>& ranks = layout.ranks_of(host);
  const auto own = c10::make_intrusive<::c10d::PrefixStore>("host" + std::to_string(host), store);
  return connect_within_host(own, layout.index_within_host(rank), static_cast<int>(ranks.size()), deadline,
                             hooks.among(ranks));
}

std::shared_ptr<Communicator> connect_hosts(const StorePointer& store, int rank, const std::vector<int>& hosts,
                                            milliseconds timeout, milliseconds warn_after,
                                            const C10dEngine::Connect& connect, std::vector<int> numbers) {
  const HostLayout layout(hosts);
  const comm::WaitHooks hooks = with_numbers(wait_hooks(warn_after), std::move(numbers), layout.size());
  const auto connect_far = [&](const C10dEngine::Place& place, const comm::WaitHooks& own_hooks) {
    // Hierarchical has compared the calls of all ranks before it gets here.
    return std::make_shared<C10dCommunicator>(std::make_shared<C10dEngine>(connect, store, place, own_hooks), false);
  };
  comm::Hierarchical::Parts parts;
  parts.inside = connect_inside(store, layout, rank, Deadline::after(timeout), hooks);
  const bool share_hosts = layout.num_hosts() < layout.size();
  parts.everyone = connect_far({"everyone", rank, layout.size(), share_hosts}, hooks);
  if (!share_hosts) {
    parts.rail = parts.everyone;
  } else if (layout.is_on_rail(rank)) {
    const int index = layout.index_within_host(rank);
    parts.rail = connect_far({"rail" + std::to_string(index), layout.host_of(rank), layout.num_hosts()},
                             hooks.among(layout.ranks_of_rail(index)));
  }
  return std::make_shared<comm::Hierarchical>(layout, std::move(parts), hooks);
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
