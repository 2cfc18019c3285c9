// Memory that all ranks of a host map, like a window of MPI_Win_allocate_shared. It has no name, is allocated in full
// when it is made, belongs to no group, and is gone with the last mapping, however the ranks end.
#pragma once

#include <cstddef>
#include <memory>

#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {

// Collective. Zero-filled; all ranks pass the same size. Throws SystemFailure on all of them, and leaves the group
// usable, when the host has too little memory.
std::shared_ptr<Buffer> open_window(ShmCommunicator& communicator, std::size_t size_bytes, const Call& call);

}  // namespace accelerate_cpp::comm
