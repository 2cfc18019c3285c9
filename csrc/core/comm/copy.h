// Copies between staging space and the memory of users.
#pragma once

#include <cstddef>

namespace accelerate_cpp::comm {

// Where a copy leaves what it writes: in the caches, or in memory only. Streaming spares reading the lines that are
// overwritten and keeps the caches for the staging space, but whoever reads the result next waits for memory.
enum class Residency { kCached, kStreamed };

// What pays for an operation that writes `result_bytes` on a rank, in however many copies: streaming, if so much does
// not stay in the caches anyway.
Residency residency_of(std::size_t result_bytes);

// Copies memory that does not overlap, of any alignment and size. What is copied is visible to every thread that sees a
// later release store of this one.
void copy(void* destination, const void* source, std::size_t size_bytes, Residency residency);

}  // namespace accelerate_cpp::comm
