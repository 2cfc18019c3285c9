#include "core/comm/shared_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

TEST(SharedBuffers, AreZeroAndAlignedToACacheLine) {
  for (const std::size_t size_bytes : {std::size_t{1}, std::size_t{100}, std::size_t{3} << 20}) {
    const std::shared_ptr<Buffer> buffer = allocate_shared(size_bytes);
    auto* const bytes = static_cast<std::byte*>(buffer->data());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % 64, 0u);
    EXPECT_TRUE(std::all_of(bytes, bytes + size_bytes, [](std::byte byte) { return byte == std::byte{0}; }));
    std::fill(bytes, bytes + size_bytes, std::byte{7});  // a later buffer in the same place is zero all the same
  }
}

TEST(SharedBuffers, MayBeEmpty) {
  EXPECT_NE(allocate_shared(0)->data(), nullptr);
}

TEST(SharedBuffers, DoNotOverlap) {
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (int i = 0; i < 100; ++i) {
    buffers.push_back(allocate_shared(100));
    std::fill_n(static_cast<unsigned char*>(buffers.back()->data()), 100, static_cast<unsigned char>(i));
  }
  for (int i = 0; i < 100; ++i) {
    const auto* const bytes = static_cast<const unsigned char*>(buffers[static_cast<std::size_t>(i)]->data());
    EXPECT_EQ(std::count(bytes, bytes + 100, static_cast<unsigned char>(i)), 100) << "buffer " << i;
  }
}

#if defined(ACCELERATE_HAS_SHM)

TEST(SharedBuffers, AreKnownFromTheirFirstToTheirLastByte) {
  constexpr std::size_t kBytes = std::size_t{2} << 20;
  const std::shared_ptr<Buffer> buffer = allocate_shared(kBytes);
  auto* const bytes = static_cast<std::byte*>(buffer->data());
  EXPECT_TRUE(is_shared(bytes, kBytes));
  EXPECT_TRUE(is_shared(bytes + kBytes - 1, 1));
  EXPECT_FALSE(is_shared(bytes + kBytes - 1, 2 + 4096)) << "reaches beyond the end and its page";
  std::vector<std::byte> ordinary(1000);
  EXPECT_FALSE(is_shared(ordinary.data(), ordinary.size()));
}

TEST(SharedBuffers, ThatCannotBeHadAreRefused) {
  EXPECT_THROW(allocate_shared(std::size_t{1} << 60), SystemFailure);
}

#endif

}  // namespace
}  // namespace accelerate_cpp::comm
