#include "core/offload/ahead_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

#include "core/base/error.h"

namespace accelerate_cpp::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Steps = std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>;

constexpr std::size_t kAny = 1'000'000;

Steps all_steps(AheadPlan& plan, std::size_t most_bytes = kAny) {
  Steps steps;
  while (const auto step = plan.next(most_bytes)) {
    steps.emplace_back(step->unit, step->begin, step->bytes);
  }
  return steps;
}

TEST(AheadPlan, HasNothingToDoBeforeAnythingArrives) {
  AheadPlan plan({10, 10}, kAny, Granularity::kPieces);
  EXPECT_FALSE(plan.is_behind());
  EXPECT_THAT(all_steps(plan), IsEmpty());
}

TEST(AheadPlan, ReadsTheRestOfThePresentUnitAndThoseAfterItUpToTheWindow) {
  AheadPlan plan({10, 20, 30, 40}, 35, Granularity::kPieces);
  EXPECT_FALSE(plan.arrive(0));
  EXPECT_TRUE(plan.is_behind());
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(0, 0, 10), std::tuple(1, 0, 20), std::tuple(2, 0, 15)));
  EXPECT_EQ(plan.bytes_ahead(), 35u);
  EXPECT_FALSE(plan.is_behind());
}

TEST(AheadPlan, GoesOnWhereItStoppedWhenTheComputationHas) {
  AheadPlan plan({10, 20, 30, 40}, 35, Granularity::kPieces);
  plan.arrive(0);
  all_steps(plan);
  EXPECT_TRUE(plan.arrive(1));
  EXPECT_EQ(plan.bytes_ahead(), 15u);
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(2, 15, 15), std::tuple(3, 0, 5)));
}

TEST(AheadPlan, GivesOutPieces) {
  AheadPlan plan({10, 20}, 20, Granularity::kPieces);
  plan.arrive(0);
  EXPECT_THAT(all_steps(plan, 8), ElementsAre(std::tuple(0, 0, 8), std::tuple(0, 8, 2), std::tuple(1, 0, 8),
                                              std::tuple(1, 8, 8), std::tuple(1, 16, 4)));
}

TEST(AheadPlan, ExpectsTheFirstUnitAfterTheLastAndNoUnitTwice) {
  AheadPlan plan({10, 10, 10}, kAny, Granularity::kPieces);
  plan.arrive(2);
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(2, 0, 10), std::tuple(0, 0, 10), std::tuple(1, 0, 10)));
}

TEST(AheadPlan, LearnsTheOrder) {
  AheadPlan plan({10, 10, 10, 10}, 10, Granularity::kPieces);
  for (const std::size_t unit : {0, 2, 1, 3}) {
    plan.arrive(unit);
  }
  plan.arrive(0);
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(0, 0, 10), std::tuple(2, 0, 10)));
}

TEST(AheadPlan, StartsOverWhereSomethingElseArrives) {
  AheadPlan plan({10, 10, 10, 10}, 20, Granularity::kPieces);
  plan.arrive(0);
  all_steps(plan);
  EXPECT_TRUE(plan.has(1));
  EXPECT_FALSE(plan.arrive(3));
  EXPECT_FALSE(plan.has(1));
  EXPECT_EQ(plan.bytes_ahead(), 0u);
}

TEST(AheadPlan, KeepsWhatIsAheadWhenAUnitIsNeededAgain) {
  AheadPlan plan({10, 10, 10}, 10, Granularity::kWholeUnits);
  plan.arrive(0);
  all_steps(plan);
  EXPECT_FALSE(plan.arrive(0)) << "it must be brought again";
  EXPECT_TRUE(plan.has(1));
  EXPECT_TRUE(plan.arrive(1)) << "expected still";
}

TEST(AheadPlan, FetchesOnlyWholeUnitsThatFitTheWindow) {
  AheadPlan plan({10, 20, 20, 10}, 35, Granularity::kWholeUnits);
  plan.arrive(0);
  EXPECT_THAT(all_steps(plan, 8), ElementsAre(std::tuple(1, 0, 20))) << "the present one is the caller's";
  EXPECT_FALSE(plan.is_behind());
  EXPECT_TRUE(plan.arrive(1));
  EXPECT_TRUE(plan.is_behind());
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(2, 0, 20), std::tuple(3, 0, 10)));
}

TEST(AheadPlan, FetchesNoUnitThatIsLargerThanTheWindow) {
  AheadPlan plan({10, 50, 10}, 35, Granularity::kWholeUnits);
  plan.arrive(0);
  EXPECT_THAT(all_steps(plan), IsEmpty());
  EXPECT_FALSE(plan.arrive(1));
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(2, 0, 10)));
}

TEST(AheadPlan, FetchesNoWholeUnitForTheNextPass) {
  AheadPlan plan({10, 10, 10}, 30, Granularity::kWholeUnits);
  for (const std::size_t unit : {1, 2, 0}) {
    plan.arrive(unit);
    all_steps(plan);
  }
  EXPECT_EQ(plan.bytes_ahead(), 0u) << "the pass began with unit 1";
  EXPECT_FALSE(plan.arrive(1));
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(2, 0, 10), std::tuple(0, 0, 10)));
}

TEST(AheadPlan, PassesOverUnitsOfNothing) {
  AheadPlan plan({10, 0, 0, 10}, 10, Granularity::kPieces);
  plan.arrive(0);
  EXPECT_THAT(all_steps(plan), ElementsAre(std::tuple(0, 0, 10), std::tuple(3, 0, 10)));
}

TEST(AheadPlan, WakesNobodyForLittle) {
  AheadPlan plan({1, 100, 10, 89}, 100, Granularity::kPieces);
  plan.arrive(0);
  all_steps(plan);
  plan.arrive(1);
  EXPECT_TRUE(plan.is_behind());
  all_steps(plan);
  plan.arrive(2);
  EXPECT_FALSE(plan.is_behind()) << "a tenth of the window is free";
}

TEST(AheadPlan, RefusesAUnitThatThereIsNot) {
  AheadPlan plan({1, 2}, 3, Granularity::kPieces);
  EXPECT_THROW(plan.arrive(2), InvalidArgument);
}

// Whatever arrives, in whatever order: nothing beyond the window, no byte of a unit twice before it arrives.
TEST(AheadPlan, KeepsToTheWindowInAnyOrder) {
  std::mt19937 random(7);
  const auto number = [&](std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(random);
  };
  for (int round = 0; round < 500; ++round) {
    std::vector<std::size_t> sizes(number(1, 6));
    for (std::size_t& size : sizes) {
      size = number(0, 20);
    }
    const std::size_t window = number(0, 40);
    const auto granularity = round % 2 == 0 ? Granularity::kPieces : Granularity::kWholeUnits;
    AheadPlan plan(sizes, window, granularity);
    std::vector<std::size_t> there(sizes.size(), 0);
    for (int arrival = 0; arrival < 30; ++arrival) {
      const std::size_t unit = number(0, sizes.size() - 1);
      plan.arrive(unit);
      for (std::size_t other = 0; other < sizes.size(); ++other) {
        there[other] = plan.has(other) || other == unit ? there[other] : 0;
      }
      for (std::size_t steps = number(0, 5); steps > 0; --steps) {
        const auto step = plan.next(7);
        ASSERT_LE(plan.bytes_ahead(), window);
        if (step && step->unit != unit) {
          ASSERT_EQ(step->begin, there[step->unit]);
          there[step->unit] += step->bytes;
          ASSERT_LE(there[step->unit], sizes[step->unit]);
        }
      }
      there[unit] = 0;
    }
  }
}

}  // namespace
}  // namespace accelerate_cpp::offload
