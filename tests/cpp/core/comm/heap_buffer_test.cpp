#include "core/comm/heap_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace accelerate_cpp::comm {
namespace {

TEST(HeapBuffers, AreZeroAndAlignedToACacheLine) {
  for (const std::size_t size_bytes : {1u, 63u, 64u, 100000u}) {
    HeapBuffer buffer(size_bytes);
    auto* const bytes = static_cast<std::byte*>(buffer.data());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % 64, 0u);
    EXPECT_TRUE(std::all_of(bytes, bytes + size_bytes, [](std::byte byte) { return byte == std::byte{0}; }));
    std::fill(bytes, bytes + size_bytes, std::byte{7});
  }
}

TEST(HeapBuffers, MayBeEmpty) {
  HeapBuffer buffer(0);
  EXPECT_NE(buffer.data(), nullptr);
}

TEST(HeapBuffers, SayHowMuchWasAskedForWhenThereIsNotEnough) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer ends the program when an allocation is absurd";
#endif
  constexpr std::size_t kTooMuch = std::numeric_limits<std::size_t>::max() / 4;
  EXPECT_THAT([] { HeapBuffer buffer(kTooMuch); },
              ::testing::ThrowsMessage<SystemFailure>(::testing::HasSubstr(std::to_string(kTooMuch) + " bytes")));
}

}  // namespace
}  // namespace accelerate_cpp::comm
