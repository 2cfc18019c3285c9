#include "core/comm/call.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

TEST(Shapes, AreEqualWhenTheirSizesAreEqual) {
  EXPECT_TRUE((Shape{2, 3} == Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3} == Shape{3, 2}));
  EXPECT_FALSE((Shape{2, 3} == Shape{2, 3, 1})) << "one more dimension, as many elements";
  EXPECT_FALSE((Shape{6} == Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3} == Shape{2}));
}

TEST(Shapes, OfScalarsAreKnownAndDifferFromThoseOfOneElementAndFromUnknownOnes) {
  const Shape scalar(nullptr, 0);
  EXPECT_TRUE(scalar.known());
  EXPECT_TRUE(scalar == Shape(nullptr, 0));
  EXPECT_FALSE((scalar == Shape{1}));
  EXPECT_FALSE(scalar == Shape());
}

TEST(Shapes, ThatAreUnknownEqualOnlyEachOther) {
  EXPECT_FALSE(Shape().known());
  EXPECT_TRUE(Shape() == Shape());
  EXPECT_FALSE((Shape() == Shape{0}));
  EXPECT_FALSE((Shape{4} == Shape()));
}

TEST(Shapes, AreUnknownWhenTheyHaveMoreDimensionsThanFit) {
  const std::vector<std::int64_t> eight(Shape::kMaxDimensions, 2);
  const std::vector<std::int64_t> nine(Shape::kMaxDimensions + 1, 2);
  EXPECT_TRUE(Shape(eight.data(), eight.size()).known());
  EXPECT_FALSE(Shape(nine.data(), nine.size()).known());
  EXPECT_TRUE(Shape(nine.data(), nine.size()) == Shape());
}

TEST(Shapes, AreWrittenAsListsOfTheirSizes) {
  EXPECT_EQ((Shape{2, 3}).to_string(), "[2, 3]");
  EXPECT_EQ((Shape{5000000000}).to_string(), "[5000000000]");
  EXPECT_EQ(Shape(nullptr, 0).to_string(), "[]");
  EXPECT_EQ(Shape().to_string(), "");
}

TEST(Shapes, CanLieInSharedMemory) {
  EXPECT_TRUE(std::is_trivially_copyable_v<Shape>);
}

TEST(Calls, NeedNoMoreThanADeadline) {
  const Call call = Deadline::never();
  EXPECT_FALSE(call.deadline.expired());
  EXPECT_FALSE(call.shape.known());
  EXPECT_TRUE(call.location.empty());
}

TEST(CallSites, HaveTheNameOfTheOperationUnlessTheProgramCalledSomethingElse) {
  const CallSite itself("train.py:88");
  EXPECT_EQ(itself.name("barrier") + itself.suffix(), "barrier at train.py:88");
  const CallSite named("gather of 2 tensors\ttrain.py:88");
  EXPECT_EQ(named.name("all_gather") + named.suffix(), "gather of 2 tensors at train.py:88");
  const CallSite unknown("");
  EXPECT_EQ(unknown.name("barrier") + unknown.suffix(), "barrier");
}

TEST(Calls, KeepTheShapeAndThePlace) {
  const Call call(Deadline::after(std::chrono::milliseconds(0)), {4, 5}, "train.py:88");
  EXPECT_TRUE(call.deadline.expired());
  EXPECT_EQ(call.shape.to_string(), "[4, 5]");
  EXPECT_EQ(call.location, "train.py:88");
}

}  // namespace
}  // namespace accelerate_cpp::comm
