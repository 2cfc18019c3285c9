#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/comm/nccl/gpu_double.h"

namespace accelerate_cpp::comm::testing {
namespace {

thread_local int t_device = 0;

constexpr CudaStatus kSuccess = CudaStatus::kSuccess;
constexpr CudaStatus kInvalidValue{1};
constexpr CudaStatus kInvalidDevice{101};
constexpr CudaStatus kInvalidHandle{400};

// Does `body` unless another status was ordered for this call.
template <class Body>
CudaStatus entry(const char* name, const Body& body) {
  GpuDouble& gpu = gpu_double();
  const GpuDouble::Lock lock(gpu.mutex);
  const int ordered = gpu.enter(name);
  return ordered != 0 ? static_cast<CudaStatus>(ordered) : body(gpu);
}

CudaStatus wrong(GpuDouble& gpu, const std::string& what, CudaStatus status) {
  gpu.problems.push_back(what);
  return status;
}

}  // namespace

GpuDouble& gpu_double() {
  static GpuDouble gpu;
  return gpu;
}

void GpuDouble::reset() {
  const Lock lock(mutex);
  t_device = 0;
  device_count = 8;
  problems.clear();
  calls.clear();
  allocations.clear();
  streams.clear();
  events.clear();
  default_streams.clear();
  orders_.clear();
  counts_.clear();
}

void GpuDouble::fail(const std::string& entry, int nth, int status) {
  const Lock lock(mutex);
  orders_[entry] = {nth, status};
}

std::shared_ptr<bool> GpuDouble::hold(CudaStream stream) {
  const Lock lock(mutex);
  auto released = std::make_shared<bool>(false);
  enqueue(stream, [released] { return *released; });
  return released;
}

void GpuDouble::release(const std::shared_ptr<bool>& held) {
  const Lock lock(mutex);
  *held = true;
}

std::string GpuDouble::leaks() {
  const Lock lock(mutex);
  std::string text;
  const auto count = [&](std::size_t number, const char* what) {
    text += number == 0 ? "" : std::to_string(number) + " " + what + " ";
  };
  count(allocations.size(), "allocations");
  count(streams.size(), "streams");
  count(events.size(), "events");
  return text;
}

std::size_t GpuDouble::count_calls(const std::string& entry) {
  const Lock lock(mutex);
  const auto found = counts_.find(entry);
  return found == counts_.end() ? 0 : found->second;
}

bool GpuDouble::was_called(const std::string& call) {
  const Lock lock(mutex);
  return std::find(calls.begin(), calls.end(), call) != calls.end();
}

int GpuDouble::enter(const std::string& call) {
  static const std::set<std::string> queries = {"cudaEventQuery", "cudaGetLastError", "cudaGetDevice",
                                                "ncclCommGetAsyncError", "cudaSetDevice"};
  const std::string entry = call.substr(0, call.find(' '));
  ++counts_[entry];
  if (queries.count(entry) == 0) {
    calls.push_back(call);
  }
  const auto order = orders_.find(entry);
  if (order == orders_.end() || --order->second.calls_left > 0) {
    return 0;
  }
  const int status = order->second.status;
  orders_.erase(order);
  return status;
}

CudaStreamOpaque& GpuDouble::resolve(CudaStream stream) {
  if (stream == nullptr) {
    default_streams[t_device].device = t_device;
    return default_streams[t_device];
  }
  return *stream;
}

void GpuDouble::enqueue(CudaStream stream, std::function<bool()> work) {
  const Lock lock(mutex);
  resolve(stream).work.push_back(std::move(work));
}

void GpuDouble::advance() {
  const auto move_on = [](CudaStreamOpaque& stream) {
    bool moved = false;
    while (!stream.work.empty() && stream.work.front()()) {
      stream.work.pop_front();
      moved = true;
    }
    return moved;
  };
  bool moved = true;
  while (moved) {
    moved = false;
    for (auto& [device, stream] : default_streams) {
      moved = move_on(stream) || moved;
    }
    for (CudaStreamOpaque* const stream : streams) {
      moved = move_on(*stream) || moved;
    }
  }
}

bool GpuDouble::owns(const void* memory, std::size_t size_bytes, int device) const {
  auto after = allocations.upper_bound(static_cast<const std::byte*>(memory));
  if (after == allocations.begin()) {
    return false;
  }
  const auto& [begin, allocation] = *std::prev(after);
  return allocation.device == device &&
         static_cast<const std::byte*>(memory) + size_bytes <= begin + allocation.size_bytes;
}

bool GpuDouble::idle(CudaStream stream) {
  const Lock lock(mutex);
  advance();
  return resolve(stream).work.empty();
}

void* GpuDouble::allocate(std::size_t size_bytes, bool by_nccl) {
  void* const memory = std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
  std::memset(memory, 0x5a, size_bytes);
  allocations[static_cast<const std::byte*>(memory)] = {size_bytes, t_device, by_nccl};
  return memory;
}

bool GpuDouble::release(void* memory, bool by_nccl) {
  const auto found = allocations.find(static_cast<const std::byte*>(memory));
  if (found == allocations.end() || found->second.by_nccl != by_nccl) {
    problems.emplace_back("memory is released that was not allocated like this");
    return false;
  }
  allocations.erase(found);
  std::free(memory);
  return true;
}

int GpuDouble::current_device() const {
  return t_device;
}

}  // namespace accelerate_cpp::comm::testing

using namespace accelerate_cpp::comm;           // NOLINT(google-build-using-namespace): names of a C interface follow
using namespace accelerate_cpp::comm::testing;  // NOLINT(google-build-using-namespace)

#define DOUBLE_ENTRY extern "C" __attribute__((visibility("default")))

DOUBLE_ENTRY CudaStatus cudaGetDeviceCount(int* count) {
  return entry("cudaGetDeviceCount", [&](GpuDouble& gpu) {
    *count = gpu.device_count;
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaGetDevice(int* device) {
  return entry("cudaGetDevice", [&](GpuDouble&) {
    *device = t_device;
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaSetDevice(int device) {
  return entry("cudaSetDevice", [&](GpuDouble& gpu) {
    if (device < 0 || device >= gpu.device_count) {
      return kInvalidDevice;
    }
    t_device = device;
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaDeviceSynchronize() {
  CudaStatus status = entry("cudaDeviceSynchronize", [](GpuDouble&) { return CudaStatus::kNotReady; });
  GpuDouble& gpu = gpu_double();
  while (status == CudaStatus::kNotReady) {
    const GpuDouble::Lock lock(gpu.mutex);
    gpu.advance();
    status = kSuccess;
    for (CudaStreamOpaque* const stream : gpu.streams) {
      status = stream->device != t_device || stream->work.empty() ? status : CudaStatus::kNotReady;
    }
  }
  return status;
}

DOUBLE_ENTRY CudaStatus cudaMalloc(void** memory, std::size_t size_bytes) {
  return entry("cudaMalloc", [&](GpuDouble& gpu) {
    *memory = gpu.allocate(size_bytes, false);
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaFree(void* memory) {
  return entry("cudaFree", [&](GpuDouble& gpu) { return gpu.release(memory, false) ? kSuccess : kInvalidValue; });
}

DOUBLE_ENTRY CudaStatus cudaStreamCreateWithFlags(CudaStream* stream, unsigned flags) {
  return entry("cudaStreamCreateWithFlags", [&](GpuDouble& gpu) {
    if (flags != kCudaStreamNonBlocking) {
      return wrong(gpu, "a stream waits for the default stream", kInvalidValue);
    }
    *stream = new CudaStreamOpaque{t_device, {}};
    gpu.streams.insert(*stream);
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaStreamDestroy(CudaStream stream) {
  return entry("cudaStreamDestroy", [&](GpuDouble& gpu) {
    gpu.advance();
    if (gpu.streams.erase(stream) == 0) {
      return wrong(gpu, "a stream is destroyed that does not exist", kInvalidHandle);
    }
    if (!stream->work.empty()) {
      gpu.problems.emplace_back("a stream is destroyed at work");
    }
    delete stream;
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned) {
  return entry("cudaStreamWaitEvent", [&](GpuDouble& gpu) {
    if (event->passed != nullptr) {
      gpu.enqueue(stream, [passed = event->passed] { return *passed; });
    }
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaEventCreateWithFlags(CudaEvent* event, unsigned flags) {
  return entry("cudaEventCreateWithFlags", [&](GpuDouble& gpu) {
    if (flags != kCudaEventDisableTiming) {
      return wrong(gpu, "an event takes the time, which costs some", kInvalidValue);
    }
    *event = new CudaEventOpaque{t_device, nullptr};
    gpu.events.insert(*event);
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaEventDestroy(CudaEvent event) {
  return entry("cudaEventDestroy", [&](GpuDouble& gpu) {
    if (gpu.events.erase(event) == 0) {
      return wrong(gpu, "an event is destroyed that does not exist", kInvalidHandle);
    }
    delete event;
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaEventRecord(CudaEvent event, CudaStream stream) {
  return entry("cudaEventRecord", [&](GpuDouble& gpu) {
    if (event->device != gpu.resolve(stream).device) {
      return wrong(gpu, "an event is recorded on a stream of another device", kInvalidHandle);
    }
    event->passed = std::make_shared<bool>(false);
    gpu.enqueue(stream, [passed = event->passed] { return *passed = true; });
    return kSuccess;
  });
}

DOUBLE_ENTRY CudaStatus cudaEventQuery(CudaEvent event) {
  return entry("cudaEventQuery", [&](GpuDouble& gpu) {
    gpu.advance();
    return event->passed == nullptr || *event->passed ? kSuccess : CudaStatus::kNotReady;
  });
}

DOUBLE_ENTRY CudaStatus cudaGetLastError() {
  return entry("cudaGetLastError", [](GpuDouble&) { return kSuccess; });
}

DOUBLE_ENTRY const char* cudaGetErrorString(CudaStatus status) {
  return status == CudaStatus::kMemoryAllocation ? "out of memory" : "an error of the double";
}
