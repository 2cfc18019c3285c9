#include "core/base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace accelerate_cpp {
namespace {

TEST(DTypes, HaveTheSizeOfTheElementThatTheyName) {
  EXPECT_EQ(element_size(DType::kFloat32), sizeof(float));
  EXPECT_EQ(element_size(DType::kFloat64), sizeof(double));
  EXPECT_EQ(element_size(DType::kFloat16), 2u);
  EXPECT_EQ(element_size(DType::kBFloat16), 2u);
  EXPECT_EQ(element_size(DType::kInt8), sizeof(std::int8_t));
  EXPECT_EQ(element_size(DType::kInt16), sizeof(std::int16_t));
  EXPECT_EQ(element_size(DType::kInt32), sizeof(std::int32_t));
  EXPECT_EQ(element_size(DType::kInt64), sizeof(std::int64_t));
  EXPECT_EQ(element_size(DType::kUInt8), sizeof(std::uint8_t));
  EXPECT_EQ(element_size(DType::kBool), sizeof(bool));
}

TEST(DTypes, AreNamedAsTorchPrintsThem) {
  EXPECT_STREQ(name(DType::kFloat32), "float32");
  EXPECT_STREQ(name(DType::kFloat64), "float64");
  EXPECT_STREQ(name(DType::kFloat16), "float16");
  EXPECT_STREQ(name(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(name(DType::kInt8), "int8");
  EXPECT_STREQ(name(DType::kInt16), "int16");
  EXPECT_STREQ(name(DType::kInt32), "int32");
  EXPECT_STREQ(name(DType::kInt64), "int64");
  EXPECT_STREQ(name(DType::kUInt8), "uint8");
  EXPECT_STREQ(name(DType::kBool), "bool");
}

TEST(DTypes, HaveDifferentNames) {
  std::set<std::string> names;
  for (int i = 0; i < kNumDTypes; ++i) {
    names.insert(name(static_cast<DType>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kNumDTypes));
}

TEST(DTypes, AreFloatingForTheFourFloatingFormatsOnly) {
  std::set<DType> floating;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (is_floating(static_cast<DType>(i))) {
      floating.insert(static_cast<DType>(i));
    }
  }
  EXPECT_EQ(floating, (std::set<DType>{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}));
}

}  // namespace
}  // namespace accelerate_cpp
