#include "core/comm/nccl/cuda_objects.h"

#include <unistd.h>

#include <algorithm>

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

void DeviceStream::copy(void* destination, const void* source, std::size_t size_bytes) {
  if (size_bytes > 0 && destination != source) {
    device_->api().check(device_->api().copy_async(destination, source, size_bytes, CudaCopyKind::kDefault, stream_),
                         "cudaMemcpyAsync");
  }
}

bool DeviceStream::idle() const {
  return device_->api().done(device_->api().stream_query(stream_), "cudaStreamQuery");
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

CudaMemory::CudaMemory(std::shared_ptr<const CudaDevice> device, MemoryKind kind, std::size_t size_bytes)
    : device_(std::move(device)), kind_(kind), size_bytes_(size_bytes) {
  const DeviceGuard guard(*device_);
  const std::size_t some = std::max<std::size_t>(size_bytes, 1);  // an address also for nothing
  const CudaApi& api = device_->api();
  if (kind == MemoryKind::kDevice) {
    api.check(api.allocate(&data_, some),
              ("cudaMalloc of " + std::to_string(some) + " bytes on cuda:" + std::to_string(device_->index())).c_str());
  } else {
    api.check(api.allocate_host(&data_, some), ("cudaMallocHost of " + std::to_string(some) + " bytes").c_str());
  }
}

CudaMemory::~CudaMemory() {
  if (device_->in_forked_child()) {
    return;
  }
  const DeviceGuard guard(*device_);
  if (kind_ == MemoryKind::kDevice) {
    device_->api().release(data_);
  } else {
    device_->api().release_host(data_);
  }
}

std::byte* GrowingMemory::at_least(std::size_t size_bytes) {
  const std::size_t now = memory_.empty() ? 0 : memory_.back()->size_bytes();
  if (memory_.empty() || now < size_bytes) {
    // Doubling bounds what is kept by twice what is in use.
    memory_.push_back(std::make_unique<CudaMemory>(device_, kind_, std::max({size_bytes, 2 * now, kFirstBytes})));
  }
  return memory_.back()->data();
}

}  // namespace accelerate_cpp::comm
