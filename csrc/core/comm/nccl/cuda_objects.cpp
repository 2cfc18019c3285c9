#include "core/comm/nccl/cuda_objects.h"

#include <unistd.h>

#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

CudaDevice::CudaDevice(std::shared_ptr<const CudaApi> api, int index)
    : api_(std::move(api)), index_(index), owner_(::getpid()) {
  int count = 0;
  api_->check(api_->get_device_count(&count), "cudaGetDeviceCount");
  if (index < 0 || index >= count) {
    throw InvalidArgument("cuda:" + std::to_string(index) + " does not exist; this process sees " +
                          std::to_string(count) + " CUDA devices");
  }
}

bool CudaDevice::in_forked_child() const {
  return ::getpid() != owner_;
}

DeviceGuard::DeviceGuard(const CudaDevice& device) : device_(device) {
  if (device.in_forked_child()) {
    return;
  }
  int current = -1;
  if (device.api().get_device(&current) == CudaStatus::kSuccess && current != device.index() &&
      device.api().set_device(device.index()) == CudaStatus::kSuccess) {
    previous_ = current;
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) {
    device_.api().set_device(previous_);
  }
}

DeviceStream::DeviceStream(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {
  const DeviceGuard guard(*device_);
  device_->api().check(device_->api().stream_create(&stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

DeviceStream::~DeviceStream() {
  if (!device_->in_forked_child()) {
    device_->api().stream_destroy(stream_);
  }
}

DeviceEvent::DeviceEvent(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {
  const DeviceGuard guard(*device_);
  device_->api().check(device_->api().event_create(&event_, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
}

DeviceEvent::~DeviceEvent() {
  if (!device_->in_forked_child()) {
    device_->api().event_destroy(event_);
  }
}

void DeviceEvent::record(CudaStream stream) {
  device_->api().check(device_->api().event_record(event_, stream), "cudaEventRecord");
}

bool DeviceEvent::passed() const {
  return device_->api().done(device_->api().event_query(event_), "cudaEventQuery");
}

void DeviceEvent::hold_back(CudaStream stream) const {
  device_->api().check(device_->api().stream_wait_event(stream, event_, 0), "cudaStreamWaitEvent");
}

}  // namespace accelerate_cpp::comm
