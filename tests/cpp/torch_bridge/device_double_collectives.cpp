// Collectives for tensors on the device double, over any backend for the CPU: both see the same memory.
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>
#include <vector>

#include "torch_bridge/device_double.h"

namespace {

using accelerate_cpp::testing::device_double::on_host;
using Tensors = std::vector<at::Tensor>;

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const at::Tensor& tensor : tensors) {
    found.push_back(on_host(tensor));
  }
  return found;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const Tensors& tensors : lists) {
    found.push_back(on_host(tensors));
  }
  return found;
}

// What was asked of the backend for the CPU; its result is the tensors on the device.
class WorkOnDevice final : public c10d::Work {
 public:
  WorkOnDevice(c10::intrusive_ptr<c10d::Work> work, Tensors result, c10d::OpType kind)
      : Work(-1, kind), work_(std::move(work)), result_(std::move(result)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  Tensors result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return work_->getFuture()->then([result = result_](c10::ivalue::Future&) { return c10::IValue(result); },
                                    c10::ListType::create(c10::TensorType::get()));
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  Tensors result_;
};

class BackendOnHost final : public c10d::Backend {
 public:
  explicit BackendOnHost(c10::intrusive_ptr<c10d::Backend> backend)
      : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)) {}

  const std::string getBackendName() const override { return "standin_collectives"; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors host = on_host(tensors);
    return on_device(backend_->allreduce(host, options), tensors, c10d::OpType::ALLREDUCE);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors host = on_host(tensors);
    return on_device(backend_->broadcast(host, options), tensors, c10d::OpType::BROADCAST);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> host_outputs = on_host(outputs);
    Tensors host_inputs = on_host(inputs);
    return on_device(backend_->allgather(host_outputs, host_inputs, options), outputs.front(), c10d::OpType::ALLGATHER);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    at::Tensor host_output = on_host(output);
    at::Tensor host_input = on_host(input);
    return on_device(backend_->_allgather_base(host_output, host_input, options), {output},
                     c10d::OpType::_ALLGATHER_BASE);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return backend_->barrier(options);
  }

 private:
  static c10::intrusive_ptr<c10d::Work> on_device(c10::intrusive_ptr<c10d::Work> work, Tensors result,
                                                  c10d::OpType kind) {
    return c10::make_intrusive<WorkOnDevice>(std::move(work), std::move(result), kind);
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

PYBIND11_MODULE(device_double_collectives, module) {
  module.def(
      "over",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<BackendOnHost>(backend);
      },
      "A backend for tensors on the device double, over one for tensors of the CPU.");
}
