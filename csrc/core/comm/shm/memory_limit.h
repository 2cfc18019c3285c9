// The memory that the control group of this process may still take. Exceeding it would get a process killed, not told.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace accelerate_cpp::comm {

// Bytes left under the tightest limit of the control group at `directory` and its ancestors (cgroup version 2: files
// memory.max and memory.current); nothing when there is no limit or no such file.
std::optional<std::size_t> memory_left_in(const std::string& directory, const std::string& root);

// Throws SystemFailure when `size_bytes` more do not fit into the control group of this process.
void check_memory_limit(std::size_t size_bytes);

}  // namespace accelerate_cpp::comm
