#include "core/base/view_parts.h"

#include <gtest/gtest.h>

#include <array>

namespace accelerate_cpp {
namespace {

TEST(ViewParts, LieWithinTheirView) {
  std::array<float, 8> memory{};
  const MemoryView whole{memory.data(), memory.size(), DType::kFloat32};
  const MemoryView inner = within(whole, 2, 3);
  EXPECT_EQ(inner.data, memory.data() + 2);
  EXPECT_EQ(inner.count, 3u);
  EXPECT_EQ(inner.dtype, DType::kFloat32);
  EXPECT_EQ(within(whole, 6, 5).count, 2u);
  EXPECT_EQ(within(whole, 9, 5).count, 0u);
}

TEST(ViewParts, OfNothingPointNowhere) {
  const ConstMemoryView part = within(ConstMemoryView{nullptr, 0, DType::kInt64}, 4, 4);
  EXPECT_EQ(part.data, nullptr);
  EXPECT_EQ(part.count, 0u);
}

TEST(ViewParts, OfAllRanksAreCutAtTheSamePlace) {
  std::array<std::uint8_t, 6> memory{};
  const std::vector<MemoryView> views{{memory.data(), 4, DType::kUInt8}, {memory.data() + 4, 2, DType::kUInt8}};
  const std::vector<MemoryView> parts = within(views, 1, 2);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].data, memory.data() + 1);
  EXPECT_EQ(parts[0].count, 2u);
  EXPECT_EQ(parts[1].data, memory.data() + 5);
  EXPECT_EQ(parts[1].count, 1u);
}

TEST(ViewParts, AreCountedPerRank) {
  std::array<std::int32_t, 6> memory{};
  const std::vector<MemoryView> views{{memory.data(), 4, DType::kInt32}, {memory.data() + 4, 2, DType::kInt32}};
  EXPECT_EQ(longest(views), 4u);
  EXPECT_EQ(longest(std::vector<MemoryView>{}), 0u);
  EXPECT_EQ(counts_of(views), (std::vector<std::uint64_t>{4, 2}));
  EXPECT_EQ(counts_of(views, 3), (std::vector<std::uint64_t>{4, 2, 0}));
  EXPECT_EQ(counts_of(std::vector<MemoryView>{}, 2), (std::vector<std::uint64_t>{0, 0}));
  EXPECT_EQ(one_count(1, 7, 3), (std::vector<std::uint64_t>{0, 7, 0}));
}

TEST(ViewParts, CanAllBeReadWhereTheyCanBeWritten) {
  std::array<float, 2> memory{};
  const std::vector<ConstMemoryView> readable = const_views({{memory.data(), 2, DType::kFloat32}});
  ASSERT_EQ(readable.size(), 1u);
  EXPECT_EQ(readable[0].data, memory.data());
  EXPECT_EQ(readable[0].count, 2u);
}

TEST(ViewParts, AreFilledFromOtherMemory) {
  const std::array<float, 2> from{1.0f, 2.0f};
  std::array<float, 2> to{};
  copy_to(from.data(), {to.data(), 2, DType::kFloat32});
  EXPECT_EQ(to, from);
  copy_to(to.data(), {to.data(), 2, DType::kFloat32});
  EXPECT_EQ(to, from);
  copy_to(nullptr, {nullptr, 0, DType::kFloat32});
}

}  // namespace
}  // namespace accelerate_cpp
