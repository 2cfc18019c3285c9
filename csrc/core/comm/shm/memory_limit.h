// The memory that this process may still take: of its control group, and of the machine. Exceeding either would get a
// process killed, not told.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace accelerate_cpp::comm {

// Bytes left under the tightest limit of the control group at `directory` and its ancestors (cgroup version 2: files
// memory.max and memory.current); nothing when there is no limit or no such file.
std::optional<std::size_t> memory_left_in(const std::string& directory, const std::string& root);

// Bytes that can be had without swapping, from a file like /proc/meminfo (line MemAvailable); nothing when it has no
// such line.
std::optional<std::size_t> memory_available(const std::string& meminfo);

// Throws SystemFailure when `size_bytes` more do not fit into the control group of this process or into the machine.
void check_memory_limit(std::size_t size_bytes);

}  // namespace accelerate_cpp::comm
