#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of accelerate_cpp.";
  namespace bindings = accelerate_cpp::bindings;
  bindings::bind_errors(module);
  bindings::bind_amp(module);
  bindings::bind_comm(module);
  bindings::bind_cuda(module);
  bindings::bind_data(module);
  bindings::bind_grad(module);
  bindings::bind_hooks(module);
  bindings::bind_hosts(module);
  bindings::bind_offload(module);
  bindings::bind_placement(module);
  bindings::bind_shared_memory(module);
  bindings::bind_tree(module);
  bindings::bind_xla(module);
}
