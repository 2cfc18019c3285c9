// Copies the weights of a model to an accelerator before the computation comes to them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/offload/ahead_worker.h"

namespace accelerate_cpp::offload {

// One tensor of a unit: where it is, in memory or in a mapped file, and the dtype that it is wanted in.
struct Weight {
  at::Tensor tensor;
  at::ScalarType dtype;
};

class AheadCopies {
 public:
  // Units after the present one take at most `window_bytes` on `device`. Copies are made in a thread and on a stream of
  // their own. Throws c10::Error for a device without streams, such as the CPU.
  AheadCopies(std::vector<std::vector<Weight>> units, at::Device device, std::size_t window_bytes);

  // The computation needs `unit` now: the copies of its weights, in their order, once they are under way; what follows
  // on the current stream of the device waits for them. Empty if they were not made ahead, a weight has been changed
  // since, or making them failed, for lack of memory, say: then the caller makes them, and is told what is wrong.
  // Throws InvalidArgument when there is no such unit.
  std::vector<at::Tensor> take(std::size_t unit);

  void await_idle() const { worker_.await_idle(); }
  // Bytes on the device that belong to units after the present one.
  std::size_t bytes_ahead() const { return worker_.bytes_ahead(); }

 private:
  struct Copies;

  std::shared_ptr<Copies> copies_;
  AheadWorker worker_;
};

}  // namespace accelerate_cpp::offload
