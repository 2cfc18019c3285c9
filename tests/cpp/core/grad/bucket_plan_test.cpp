#include "core/grad/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::size_t kMegabyte = 1024 * 1024;

std::vector<std::size_t> in_order(std::size_t size) {
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

std::vector<ParameterSpec> floats(const std::vector<std::size_t>& counts) {
  std::vector<ParameterSpec> parameters;
  for (const std::size_t count : counts) {
    parameters.push_back({DType::kFloat32, count});
  }
  return parameters;
}

std::size_t size_bytes(const BucketLayout& bucket) {
  return bucket.count * element_size(bucket.dtype);
}

TEST(BucketPlan, OfNoParametersHasNoBuckets) {
  const BucketPlan plan = plan_buckets({}, {}, 1, 1);
  EXPECT_TRUE(plan.buckets.empty());
  EXPECT_TRUE(plan.slots.empty());
}

TEST(BucketPlan, PutsWhatFitsIntoOneBucket) {
  const BucketPlan plan = plan_buckets(floats({16, 32, 16}), in_order(3), kMegabyte, kMegabyte);
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(0, 1, 2));
  EXPECT_EQ(plan.buckets[0].count, 64u);
  EXPECT_EQ(plan.slots[2].offset, 48u);
  EXPECT_EQ(plan.slots[2].index, 2u);
}

TEST(BucketPlan, FollowsTheGivenOrderAndNotThatOfTheParameters) {
  const BucketPlan plan = plan_buckets(floats({16, 16, 16}), {2, 0, 1}, kMegabyte, kMegabyte);
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(2, 0, 1));
  EXPECT_EQ(plan.slots[2].offset, 0u);
  EXPECT_EQ(plan.slots[0].offset, 16u);
  EXPECT_EQ(plan.slots[1].offset, 32u);
}

TEST(BucketPlan, FillsABucketToItsCapAndNoByteFurther) {
  const BucketPlan exact = plan_buckets(floats({16, 16}), in_order(2), 128, 128);
  EXPECT_EQ(exact.buckets.size(), 1u);
  const BucketPlan over = plan_buckets(floats({16, 16}), in_order(2), 127, 127);
  EXPECT_EQ(over.buckets.size(), 2u);
}

TEST(BucketPlan, GivesTheFirstBucketItsOwnCap) {
  const BucketPlan plan = plan_buckets(floats({16, 16, 16, 16, 16}), in_order(5), 64, 128);
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(0));
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(1, 2));
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(3, 4));
}

TEST(BucketPlan, GivesALargeParameterABucketOfItsOwn) {
  const BucketPlan plan = plan_buckets(floats({16, 1000, 16, 16}), in_order(4), 256, 256);
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(1));
  EXPECT_EQ(plan.slots[1].offset, 0u);
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(2, 3));
}

TEST(BucketPlan, GivesALargeFirstParameterABucketOfItsOwn) {
  const BucketPlan plan = plan_buckets(floats({1000, 16, 16}), in_order(3), 64, 1024);
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(0));
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(1, 2));
}

TEST(BucketPlan, NeverMixesDTypesInABucket) {
  const std::vector<ParameterSpec> parameters = {
      {DType::kFloat32, 3}, {DType::kBFloat16, 3}, {DType::kFloat32, 5}, {DType::kBFloat16, 5}};
  const BucketPlan plan = plan_buckets(parameters, in_order(4), kMegabyte, kMegabyte);
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.buckets[0].dtype, DType::kFloat32);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(0, 2));
  EXPECT_EQ(plan.buckets[1].dtype, DType::kBFloat16);
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(1, 3));
}

TEST(BucketPlan, HasASlotForAParameterWithoutElements) {
  const BucketPlan plan = plan_buckets(floats({16, 0, 16}), in_order(3), kMegabyte, kMegabyte);
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(0, 1, 2));
  EXPECT_EQ(plan.buckets[0].count, 32u);
}

// Checks what every plan promises, whatever its input.
void expect_valid(const BucketPlan& plan, const std::vector<ParameterSpec>& parameters, std::size_t first_cap_bytes,
                  std::size_t cap_bytes) {
  ASSERT_EQ(plan.slots.size(), parameters.size());
  std::size_t num_placed = 0;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& bucket = plan.buckets[b];
    std::size_t end = 0;
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i, ++num_placed) {
      const Slot& slot = plan.slots[bucket.parameters[i]];
      const ParameterSpec& parameter = parameters[bucket.parameters[i]];
      EXPECT_EQ(slot.bucket, b);
      EXPECT_EQ(slot.index, i);
      EXPECT_EQ(parameter.dtype, bucket.dtype);
      EXPECT_EQ(slot.offset * element_size(bucket.dtype) % 64, 0u);
      EXPECT_GE(slot.offset, end) << "slots overlap";
      end = slot.offset + parameter.count;
    }
    EXPECT_LE(end, bucket.count);
    EXPECT_FALSE(bucket.parameters.empty());
    if (bucket.parameters.size() > 1) {
      EXPECT_LE(size_bytes(bucket), b == 0 ? first_cap_bytes : cap_bytes);
    }
  }
  EXPECT_EQ(num_placed, parameters.size());
}

TEST(BucketPlan, PlacesEveryParameterOnceWithoutOverlapForAnyModel) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  std::mt19937 random(7);
  for (int trial = 0; trial < 200 && !HasFailure(); ++trial) {
    std::vector<ParameterSpec> parameters;
    for (std::size_t i = random() % 40; i > 0; --i) {
      parameters.push_back({kDTypes[random() % 4], random() % (random() % 4 == 0 ? 5000 : 70)});
    }
    std::vector<std::size_t> order = in_order(parameters.size());
    std::shuffle(order.begin(), order.end(), random);
    const std::size_t first_cap_bytes = 1 + random() % 2000;
    const std::size_t cap_bytes = 1 + random() % 8000;
    expect_valid(plan_buckets(parameters, order, first_cap_bytes, cap_bytes), parameters, first_cap_bytes, cap_bytes);
  }
}

TEST(BucketPlan, RefusesAnOrderThatIsNoPermutation) {
  const std::vector<ParameterSpec> parameters = floats({1, 1, 1});
  EXPECT_THAT([&] { plan_buckets(parameters, {0, 1, 1}, 1, 1); },
              ThrowsMessage<InvalidArgument>(HasSubstr("names parameter 1 twice or out of range")));
  EXPECT_THAT([&] { plan_buckets(parameters, {0, 1, 3}, 1, 1); },
              ThrowsMessage<InvalidArgument>(HasSubstr("names parameter 3 twice or out of range")));
  EXPECT_THAT([&] { plan_buckets(parameters, {2, 0}, 1, 1); },
              ThrowsMessage<InvalidArgument>(HasSubstr("names 2 of 3 parameters")));
  EXPECT_THROW(plan_buckets(parameters, {0, 1, 2, 0}, 1, 1), InvalidArgument);
}

TEST(BucketPlan, RefusesACapOfNothing) {
  EXPECT_THROW(plan_buckets(floats({1}), {0}, 0, 1), InvalidArgument);
  EXPECT_THROW(plan_buckets(floats({1}), {0}, 1, 0), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::grad
