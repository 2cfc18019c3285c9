#include "torch_bridge/nccl_device_group.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/base/error.h"
#include "torch_bridge/device_kernels.h"
#include "torch_bridge/tensor_view.h"
#include "torch_bridge/torch_versions.h"

namespace accelerate_cpp::grad {
namespace {

class NcclDeviceGroup : public std::enable_shared_from_this<NcclDeviceGroup> {
 public:
  NcclDeviceGroup(std::shared_ptr<comm::NcclComm> comm, CurrentStream current_stream)
      : comm_(std::move(comm)),
        current_stream_(std::move(current_stream)),
        stream_(comm_->context().device),
        ready_(comm_->context().device) {}

  std::function<void()> sum(const at::Tensor& bucket) {
    const comm::DeviceGuard guard(*comm_->context().device);
    ready_.record(current_stream_());
    ready_.hold_back(stream_.get());
    const Elements elements = elements_of(bucket);
    comm_->all_reduce({bucket.mutable_data_ptr(), elements.count, elements.dtype}, comm::ReduceOp::kSum, stream_.get());
    const auto done = std::make_shared<comm::DeviceEvent>(comm_->context().device);
    done->record(stream_.get());
    return [self = shared_from_this(), done] {
      const comm::DeviceGuard current(*self->comm_->context().device);
      done->hold_back(self->current_stream_());
    };
  }

  at::Tensor allocate(std::int64_t count, const at::TensorOptions& options) const {
    const auto memory = comm_->allocate(static_cast<std::size_t>(count) * options.dtype().itemsize());
    const auto keep = [memory](void*) {};
    return at::from_blob(memory->data(), {count}, keep, options, options.device()).zero_();
  }

  void abort() { comm_->abort("the backward pass of a rank failed"); }

 private:
  const std::shared_ptr<comm::NcclComm> comm_;
  const CurrentStream current_stream_;
  comm::DeviceStream stream_;  // of the sums
  comm::DeviceEvent ready_;    // when the latest bucket was
};

}  // namespace

CurrentStream current_stream_of_torch(const c10::Device& device) {
  return [guard = c10::impl::VirtualGuardImpl(device.type()), device] {
    return static_cast<comm::CudaStream>(comm::native_handle(guard.getStream(device)));
  };
}

DeviceGroup nccl_device_group(std::shared_ptr<comm::NcclComm> comm, CurrentStream current_stream,
                              std::shared_ptr<const cuda::LoadedSlotKernels> kernels) {
  const auto group = std::make_shared<NcclDeviceGroup>(std::move(comm), std::move(current_stream));
  return {[group](const at::Tensor& bucket) { return group->sum(bucket); }, [group] { group->abort(); },
          std::move(kernels),
          [group](std::int64_t count, const at::TensorOptions& options) { return group->allocate(count, options); }};
}

comm::NcclContext nccl_on(const c10::Device& device) {
  if (!device.is_cuda()) {
    throw InvalidArgument("NCCL is for CUDA devices; found " + device.str());
  }
  const std::string torch = folder_of_torch();
  return {std::make_shared<const comm::NcclApi>("", torch),
          std::make_shared<const comm::CudaDevice>(std::make_shared<const comm::CudaApi>("", torch), device.index())};
}

}  // namespace accelerate_cpp::grad
