#include "torch_bridge/device_double.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

namespace accelerate_cpp::testing::device_double {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kPoolStream = 1;

struct Memory {
  std::mutex mutex;
  std::int64_t in_use = 0;
  std::int64_t peak = 0;
  std::int64_t room = std::numeric_limits<std::int64_t>::max();
};

struct Copies {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;
  std::int64_t on_pool = 0;
};

Memory& memory() {
  static auto* const memory = new Memory;  // tensors may outlive everything
  return *memory;
}

Copies& copies() {
  static auto* const copies = new Copies;
  return *copies;
}

std::atomic<std::int64_t> waits{0};
thread_local c10::StreamId current_stream = 0;
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current_device = 0;

struct Block {
  void* data;
  std::int64_t bytes;
};

void release(void* context) {
  auto* const block = static_cast<Block*>(context);
  {
    const std::lock_guard lock(memory().mutex);
    memory().in_use -= block->bytes;
  }
  std::free(block->data);
  delete block;
}

class DoubleAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    const auto bytes = static_cast<std::int64_t>(size);
    const std::lock_guard lock(memory().mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, memory().in_use + bytes <= memory().room, "the device double has no room for ",
                     bytes, " bytes");
    memory().in_use += bytes;
    memory().peak = std::max(memory().peak, memory().in_use);
    auto* const block = new Block{size > 0 ? std::malloc(size) : nullptr, bytes};
    return {block->data, block, &release, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

DoubleAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct DoubleGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device next) const override {
    const c10::Device before = getDevice();
    setDevice(next);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device next) const override {
    TORCH_CHECK(next.index() < kDevices, "the device double has ", kDevices, " devices, asked for ", next);
    uncheckedSetDevice(next);
  }
  void uncheckedSetDevice(c10::Device next) const noexcept override {
    current_device = std::max<c10::DeviceIndex>(next.index(), 0);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, kPoolStream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_stream = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(on.id() + 1);  // NOLINT(performance-no-int-to-ptr): never followed
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr && reinterpret_cast<c10::StreamId>(event) != waiting.id() + 1) {
      ++waits;
    }
  }
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    const c10::Device numbered(kType, std::max<c10::DeviceIndex>(device.index(), 0));
    return c10::Stream(c10::Stream::UNSAFE, numbered, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DoubleGuard)

struct DoubleHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void pass_gate() {
  if (current_stream != kPoolStream) {
    return;
  }
  std::unique_lock lock(copies().mutex);
  copies().changed.wait(lock, [] { return !copies().held; });
  ++copies().on_pool;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  pass_gate();
  on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  on_host(target).copy_(on_host(self));
  return target;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const auto bytes = static_cast<std::size_t>(tensor->numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    self.storage().set_data_ptr(allocator.allocate(bytes));
    self.storage().set_nbytes(bytes);
  }
  return self;
}

at::Tensor& set_part_of_storage(at::Tensor& self, c10::Storage storage, std::int64_t offset, c10::IntArrayRef size,
                                c10::IntArrayRef stride) {
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  const auto count = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
  return set_part_of_storage(self, std::move(storage), 0, {count}, {1});
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part_of_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

// For Python: torch.ops.device_double.peak_bytes() and the rest.
TORCH_LIBRARY(device_double, m) {
  m.def("bytes_in_use", &bytes_in_use);
  m.def("peak_bytes", &peak_bytes);
  m.def("forget_peak", &forget_peak);
  m.def("set_room", &set_room);
  m.def("pool_copies", &pool_copies);
  m.def("stream_waits", &stream_waits);
  m.def("hold_pool_copies", &hold_pool_copies);
  m.def("current_device", [] { return static_cast<std::int64_t>(current_device); });
  m.def("set_device",
        [](std::int64_t index) { DoubleGuard().setDevice(c10::Device(kType, static_cast<c10::DeviceIndex>(index))); });
}

namespace {

[[maybe_unused]] const bool kHooked = [] {
  at::RegisterPrivateUse1HooksInterface(new DoubleHooks);
  return true;
}();

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU));
}

std::int64_t bytes_in_use() {
  const std::lock_guard lock(memory().mutex);
  return memory().in_use;
}

std::int64_t peak_bytes() {
  const std::lock_guard lock(memory().mutex);
  return memory().peak;
}

void forget_peak() {
  const std::lock_guard lock(memory().mutex);
  memory().peak = memory().in_use;
}

void set_room(std::int64_t bytes) {
  const std::lock_guard lock(memory().mutex);
  memory().room = bytes;
}

std::int64_t pool_copies() {
  const std::lock_guard lock(copies().mutex);
  return copies().on_pool;
}

std::int64_t stream_waits() {
  return waits;
}

void hold_pool_copies(bool held) {
  const std::lock_guard lock(copies().mutex);
  copies().held = held;
  copies().changed.notify_all();
}

}  // namespace accelerate_cpp::testing::device_double
