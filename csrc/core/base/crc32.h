// The checksum of zip archives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace accelerate_cpp {

// The CRC-32 of zip and zlib (polynomial 0xEDB88320, reflected) of bytes that follow others with the checksum `before`;
// 0 if there are none. Uses carry-less multiplication where the processor has it, which is as fast as the cache.
std::uint32_t crc32(std::uint32_t before, const void* bytes, std::size_t size_bytes);

// The same without special instructions.
std::uint32_t crc32_portable(std::uint32_t before, const void* bytes, std::size_t size_bytes);

}  // namespace accelerate_cpp
