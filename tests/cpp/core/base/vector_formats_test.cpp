#define ACCELERATE_KERNELS formats_test
#include "core/base/vector_formats.h"

#include <gtest/gtest.h>

#include <cstring>

// For the instruction set of this test; reduce_kernels_test.cpp and epilogue_loops_test.cpp run all of them.
namespace accelerate_cpp::formats_test {
namespace {

// Widens vectors of all bit patterns and narrows them again; `check` gets each pattern with the outcome.
template <class Access, class Check>
void for_every_pattern(const Check& check) {
  constexpr std::size_t kCount = sizeof(typename Access::Elements) / 2;
  for (std::uint32_t first = 0; first <= 0xffff; first += kCount) {
    std::uint16_t patterns[kCount];
    for (std::size_t i = 0; i < kCount; ++i) {
      patterns[i] = static_cast<std::uint16_t>(first + i);
    }
    typename Access::Elements elements;
    std::memcpy(&elements, patterns, sizeof(elements));
    Floats values[Access::kParts];
    Access::widen(elements, values);
    elements = Access::narrow(values);
    std::uint16_t outcome[kCount];
    std::memcpy(outcome, &elements, sizeof(elements));
    for (std::size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(outcome[i], check(patterns[i])) << patterns[i];
    }
  }
}

TEST(VectorFormats, OfSixteenBitsAreWidenedAndNarrowedLikeSingleOnes) {
  for_every_pattern<Float16AsFloat>([](std::uint16_t bits) { return to_float16(to_float(Float16{bits})).bits; });
  for_every_pattern<BFloat16AsFloat>([](std::uint16_t bits) { return to_bfloat16(to_float(BFloat16{bits})).bits; });
}

TEST(VectorFormats, OfBFloat16AreSplitIntoEvenAndOddElements) {
  const Bits elements = Bits{} + 0x40003f80u;  // 1 and 2
  Floats values[2];
  BFloat16AsFloat::widen(elements, values);
  EXPECT_EQ(values[0][0], 1.0f);
  EXPECT_EQ(values[1][0], 2.0f);
}

TEST(VectorFormats, AreReadAndWrittenAnywhereInMemory) {
  char memory[sizeof(Floats) + 1] = {};
  ThroughCache{}.store(memory + 1, Floats{} + 2.5f);
  EXPECT_EQ(ThroughCache{}.load<Floats>(memory + 1)[3], 2.5f);
  EXPECT_EQ(memory[0], 0);
}

TEST(VectorFormats, CanBeCutShort) {
  float memory[] = {1.0f, 2.0f, 3.0f};
  const Partial two{2 * sizeof(float)};
  const Floats loaded = two.load<Floats>(reinterpret_cast<const char*>(memory));
  EXPECT_EQ(loaded[1], 2.0f);
  EXPECT_EQ(loaded[2], 0.0f);
  two.store(reinterpret_cast<char*>(memory), loaded * 2.0f);
  EXPECT_EQ(memory[1], 4.0f);
  EXPECT_EQ(memory[2], 3.0f);
}

}  // namespace
}  // namespace accelerate_cpp::formats_test
