// What this library owns of a GPU, each released when its owner goes. Releasing reports nothing: it also happens while
// the process ends, when the driver may be gone. A forked child releases nothing, since CUDA does not live on in it.
#pragma once

#include <sys/types.h>

#include <memory>

#include "core/comm/nccl/cuda_api.h"

namespace accelerate_cpp::comm {

// A GPU, reached through one CUDA runtime, by the process that made this object.
class CudaDevice {
 public:
  // Throws InvalidArgument when there is no such GPU.
  CudaDevice(std::shared_ptr<const CudaApi> api, int index);

  const CudaApi& api() const { return *api_; }
  int index() const { return index_; }
  bool in_forked_child() const;

 private:
  std::shared_ptr<const CudaApi> api_;
  int index_;
  pid_t owner_;
};

// Makes a device the calling thread's current one for as long as it lives. Does nothing in a forked child.
class DeviceGuard {
 public:
  explicit DeviceGuard(const CudaDevice& device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const CudaDevice& device_;
  int previous_ = -1;
};

// A stream that does not wait for the default stream.
class DeviceStream {
 public:
  explicit DeviceStream(std::shared_ptr<const CudaDevice> device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  CudaStream get() const { return stream_; }

 private:
  std::shared_ptr<const CudaDevice> device_;
  CudaStream stream_ = nullptr;
};

// A point in the work of a stream. Streams may be of any owner; null is the default stream.
class DeviceEvent {
 public:
  explicit DeviceEvent(std::shared_ptr<const CudaDevice> device);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void record(CudaStream stream);
  // Whether the work before record() has ended; true if it was never called.
  bool passed() const;
  // What `stream` is given from now on starts when this event has passed.
  void hold_back(CudaStream stream) const;

 private:
  std::shared_ptr<const CudaDevice> device_;
  CudaEvent event_ = nullptr;
};

}  // namespace accelerate_cpp::comm
