// An accelerator for tests, as torch's device type "privateuseone", of which there are two: its memory is the host's,
// its operations are the CPU's, and what it was asked to do can be looked at. Copies on a stream of the pool can be
// held.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#if defined(_WIN32)
#error "the double is for systems with POSIX symbols"
#endif
#define DEVICE_DOUBLE_API __attribute__((visibility("default")))

namespace accelerate_cpp::testing::device_double {

// The memory of `tensor`, as a tensor of the CPU.
DEVICE_DOUBLE_API at::Tensor on_host(const at::Tensor& tensor);

// Of tensors on the device, now and at most since the last call of `forget_peak`.
DEVICE_DOUBLE_API std::int64_t bytes_in_use();
DEVICE_DOUBLE_API std::int64_t peak_bytes();
DEVICE_DOUBLE_API void forget_peak();

// Allocations beyond so many bytes fail.
DEVICE_DOUBLE_API void set_room(std::int64_t bytes);

// Copies that were made on a stream of the pool, and waits of streams for events of others.
DEVICE_DOUBLE_API std::int64_t pool_copies();
DEVICE_DOUBLE_API std::int64_t stream_waits();

// While held, copies on a stream of the pool do not end.
DEVICE_DOUBLE_API void hold_pool_copies(bool held);

}  // namespace accelerate_cpp::testing::device_double
