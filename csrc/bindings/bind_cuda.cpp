#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "torch_bridge/device_kernels.h"

namespace accelerate_cpp::bindings {

void bind_cuda(py::module_& module) {
  module.def(
      "cuda_capabilities", [](const std::string& compiler) { return grad::kernel_compiler(compiler).capabilities(); },
      py::arg("compiler") = "", py::call_guard<py::gil_scoped_release>(),
      "The compute capabilities (90 for 9.0) for which the library of CUDA's compiler, NVRTC, can compile. Needs no "
      "GPU.");
  module.def(
      "compile_gradient_kernels",
      [](int capability, const std::string& compiler) {
        const cuda::KernelImage image = [&] {
          const py::gil_scoped_release release;
          return grad::kernel_compiler(compiler).slot_kernels(capability);
        }();
        return std::pair(image.architecture, py::bytes(image.bytes));
      },
      py::arg("capability"), py::arg("compiler") = "",
      "Compiles the kernels that measure gradients on CUDA devices of one compute capability; the architecture that "
      "was "
      "compiled for, and its code. Needs no GPU.");
}

}  // namespace accelerate_cpp::bindings
