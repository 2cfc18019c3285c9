// Copies between staging space and the memory of users.
#pragma once

#include <cstddef>
#include <vector>

namespace accelerate_cpp::comm {

// Where a copy leaves what it writes: in the caches, or in memory only. Streaming spares reading the lines that are
// overwritten and keeps the caches for the staging space, but the next reader of the result waits for memory.
enum class Residency { kCached, kStreamed };

// The faster choice for an operation that writes `result_bytes` on a rank, in any number of copies: streaming, if they
// would not stay in the caches anyway.
Residency residency_of(std::size_t result_bytes);

// Copies memory that does not overlap, of any alignment and size. What is copied is visible to every thread that sees a
// later release store of this one.
void copy(void* destination, const void* source, std::size_t size_bytes, Residency residency);

// One copy among several, of memory that does not overlap.
struct Copy {
  void* destination;
  const void* source;
  std::size_t size_bytes;
};

// Carries out `copies` by the caller and up to `num_threads` - 1 further threads, which divide them among each other in
// pieces; by fewer where there is little to copy, or where the system refuses threads. Returns when all are complete.
void copy_all(const std::vector<Copy>& copies, int num_threads);

}  // namespace accelerate_cpp::comm
