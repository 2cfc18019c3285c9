#include "core/comm/shared_buffer.h"

#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shared_segments.h"
#else
#include "core/comm/heap_buffer.h"
#endif

namespace accelerate_cpp::comm {

#if defined(ACCELERATE_HAS_SHM)

std::shared_ptr<Buffer> allocate_shared(std::size_t size_bytes) {
  return SharedSegments::of_process().allocate(size_bytes);
}

bool is_shared(const void* data, std::size_t size_bytes) {
  return SharedSegments::of_process().find(data, size_bytes).segment != nullptr;
}

#else

std::shared_ptr<Buffer> allocate_shared(std::size_t size_bytes) {
  return std::make_shared<HeapBuffer>(size_bytes);
}

bool is_shared(const void*, std::size_t) {
  return false;
}

#endif

}  // namespace accelerate_cpp::comm
