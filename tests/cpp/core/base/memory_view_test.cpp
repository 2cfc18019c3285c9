#include "core/base/memory_view.h"

#include <gtest/gtest.h>

#include <array>

namespace accelerate_cpp {
namespace {

TEST(MemoryViews, CountBytesByTheirElementType) {
  std::array<std::byte, 64> memory{};
  EXPECT_EQ((MemoryView{memory.data(), 7, DType::kFloat64}.size_bytes()), 56u);
  EXPECT_EQ((MemoryView{memory.data(), 7, DType::kBFloat16}.size_bytes()), 14u);
  EXPECT_EQ((ConstMemoryView{memory.data(), 7, DType::kInt32}.size_bytes()), 28u);
  EXPECT_EQ((ConstMemoryView{memory.data(), 7, DType::kBool}.size_bytes()), 7u);
}

TEST(MemoryViews, OfNothingAreEmpty) {
  EXPECT_EQ(MemoryView{}.size_bytes(), 0u);
  EXPECT_EQ(MemoryView{}.bytes(), nullptr);
  EXPECT_EQ(ConstMemoryView{}.size_bytes(), 0u);
  EXPECT_EQ(ConstMemoryView{}.bytes(), nullptr);
}

TEST(MemoryViews, CanBeReadWhereverTheyCanBeWritten) {
  std::array<float, 3> memory{1.0f, 2.0f, 3.0f};
  const MemoryView writable{memory.data(), memory.size(), DType::kFloat32};
  const ConstMemoryView readable = writable;
  EXPECT_EQ(readable.data, writable.data);
  EXPECT_EQ(readable.count, writable.count);
  EXPECT_EQ(readable.dtype, writable.dtype);
  EXPECT_EQ(readable.size_bytes(), writable.size_bytes());
}

TEST(MemoryViews, AddressTheMemoryOfTheirOwnerWithoutACopy) {
  std::array<std::uint8_t, 2> memory{1, 2};
  const MemoryView view{memory.data(), memory.size(), DType::kUInt8};
  view.bytes()[1] = std::byte{9};
  EXPECT_EQ(memory[1], 9);
  EXPECT_EQ(ConstMemoryView(view).bytes()[1], std::byte{9});
}

}  // namespace
}  // namespace accelerate_cpp
