#include "core/base/crc32.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace accelerate_cpp {
namespace {

// One bit after the other, as the polynomial is defined.
std::uint32_t by_bits(const unsigned char* bytes, std::size_t size_bytes) {
  std::uint32_t state = ~0U;
  for (std::size_t i = 0; i < size_bytes; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1) != 0 ? 0xEDB88320U : 0U);
    }
  }
  return ~state;
}

TEST(Crc32, IsTheOneOfZip) {
  const std::string text = "123456789";
  EXPECT_EQ(crc32(0, text.data(), text.size()), 0xCBF43926U);  // the check value of the catalogues
  EXPECT_EQ(crc32(0, nullptr, 0), 0U);
}

TEST(Crc32, IsRightForEverySizeAndAlignment) {
  std::vector<unsigned char> bytes(2000);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(i * 167 + i / 13);
  }
  for (std::size_t size = 0; size < 400; ++size) {
    const unsigned char* const begin = bytes.data() + size % 17;
    const std::uint32_t expected = by_bits(begin, size);
    ASSERT_EQ(crc32(0, begin, size), expected) << size;
    ASSERT_EQ(crc32_portable(0, begin, size), expected) << size;
  }
}

TEST(Crc32, GoesOnFromWhatCameBefore) {
  std::vector<unsigned char> bytes(2000, 0xA7);
  const std::uint32_t whole = by_bits(bytes.data(), bytes.size());
  for (const std::size_t first : {0, 1, 63, 64, 1000, 1990, 2000}) {
    EXPECT_EQ(crc32(crc32(0, bytes.data(), first), bytes.data() + first, bytes.size() - first), whole) << first;
  }
}

}  // namespace
}  // namespace accelerate_cpp
