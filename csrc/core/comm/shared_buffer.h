// Memory of this process that every group on this host can work on without a staging copy.
#pragma once

#include <cstddef>
#include <memory>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

// `size_bytes` of zero-filled memory, aligned to 64 bytes, that belongs to no group: a ShmCommunicator that meets it as
// an operand hands it to its own peers on first use. Where memory cannot be shared it is ordinary memory. Throws
// SystemFailure when there is not enough.
std::shared_ptr<Buffer> allocate_shared(std::size_t size_bytes);

// Whether [data, data + size_bytes) lies in memory from allocate_shared().
bool is_shared(const void* data, std::size_t size_bytes);

}  // namespace accelerate_cpp::comm
