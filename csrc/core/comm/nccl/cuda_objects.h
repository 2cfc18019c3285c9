// What this library owns of a GPU, each released when its owner goes. Releasing reports nothing: it also happens while
// the process ends, when the driver may be gone. A forked child releases nothing, since CUDA does not live on in it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

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
  // Copies `size_bytes`, which may be 0, in the order of the stream.
  void copy(void* destination, const void* source, std::size_t size_bytes);
  // Whether all that was put into it has ended.
  bool idle() const;

 private:
  std::shared_ptr<const CudaDevice> device_;
  CudaStream stream_ = nullptr;
};

// A point in the work of a stream.
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

enum class MemoryKind { kDevice, kPinned };

// Memory of the device, or page-locked memory of the host, aligned to at least 256 bytes.
class CudaMemory {
 public:
  CudaMemory(std::shared_ptr<const CudaDevice> device, MemoryKind kind, std::size_t size_bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::shared_ptr<const CudaDevice> device_;
  MemoryKind kind_;
  std::size_t size_bytes_;
  void* data_ = nullptr;
};

// Memory that grows on demand. What it has outgrown is kept until the end: releasing memory of a device waits for all
// work on it, also for a receive whose sender is waiting for us.
class GrowingMemory {
 public:
  GrowingMemory(std::shared_ptr<const CudaDevice> device, MemoryKind kind) : device_(std::move(device)), kind_(kind) {}

  // At least `size_bytes`; the contents are kept only while it does not grow.
  std::byte* at_least(std::size_t size_bytes);

 private:
  static constexpr std::size_t kFirstBytes = 4096;

  std::shared_ptr<const CudaDevice> device_;
  MemoryKind kind_;
  std::vector<std::unique_ptr<CudaMemory>> memory_;  // the last is in use
};

}  // namespace accelerate_cpp::comm
