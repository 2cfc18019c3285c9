// The kernels of slot_kernels.h, on one device.
#pragma once

#include <memory>
#include <optional>

#include "core/base/dtype.h"
#include "core/cuda/driver_api.h"
#include "core/cuda/kernel_compiler.h"
#include "core/cuda/slot_layout.h"

namespace accelerate_cpp::cuda {

// One bucket and what to do with it. All memory is on the device.
struct SlotPass {
  DType dtype;  // of the elements: a floating one
  void* bucket;
  const Chunk* chunks;
  unsigned num_chunks;
  const unsigned* first_chunks;  // of each slot, and one past the last: chunks_of()
  unsigned num_slots;
  Partial* partials;             // room for one per chunk
  double* rows;                  // per slot: the sum of the squares, the number of non-finite elements
  std::optional<double> factor;  // multiplies the elements first
};

class LoadedSlotKernels {
 public:
  // Compiles for device `ordinal`, as the CUDA runtime numbers them, and loads into its primary context, which is
  // torch's. Both stay until the process ends. Throws SystemFailure.
  LoadedSlotKernels(std::shared_ptr<const DriverApi> driver, const KernelCompiler& compiler, int ordinal);

  // For which the kernels were compiled: "sm_90".
  const std::string& architecture() const { return architecture_; }

  // Puts the pass on `stream`, of the same device, and returns. Throws SystemFailure when the driver refuses, and
  // InvalidArgument for dtypes that gradients do not have. Thread-safe.
  void run(const SlotPass& pass, Stream stream) const;

 private:
  struct Kernels {
    Function measure = nullptr;
    Function scale = nullptr;
  };

  void load(int device, const KernelImage& image);
  void launch(Function function, unsigned num_blocks, void** parameters, Stream stream) const;

  std::shared_ptr<const DriverApi> driver_;
  std::string architecture_;
  Context context_ = nullptr;
  Kernels float32_;
  Kernels float64_;
  Kernels float16_;
  Kernels bfloat16_;
  Function combine_ = nullptr;
};

}  // namespace accelerate_cpp::cuda
