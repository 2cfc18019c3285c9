#include "core/placement/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "core/base/error.h"

namespace accelerate_cpp::placement {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kEnoughSteps = 1'000'000;

struct Drawn {
  Sizes blocks;
  Sizes capacities;
};

Drawn draw(std::mt19937& random) {
  const auto number = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Drawn drawn;
  for (int block = number(0, 7); block > 0; --block) {
    drawn.blocks.push_back(number(0, 9));
  }
  for (int device = number(1, 3); device > 0; --device) {
    drawn.capacities.push_back(number(0, 20));
  }
  return drawn;
}

Sizes loads(const Drawn& drawn, const std::vector<int>& devices) {
  Sizes loads(drawn.capacities.size(), 0);
  for (std::size_t block = 0; block < devices.size(); ++block) {
    loads[static_cast<std::size_t>(devices[block])] += drawn.blocks[block];
  }
  return loads;
}

bool keeps_within(const Sizes& loads, const Sizes& capacities) {
  return std::equal(loads.begin(), loads.end(), capacities.begin(), std::less_equal<>());
}

struct BruteForce {
  bool fits = false;
  bool fits_in_order = false;
  std::int64_t smallest_largest = 0;
  std::int64_t smallest_squares = 0;  // among the orders with that largest load
};

// All ways to give the blocks devices.
BruteForce try_all(const Drawn& drawn) {
  BruteForce found;
  const int count = static_cast<int>(drawn.capacities.size());
  std::vector<int> devices(drawn.blocks.size(), 0);
  for (;;) {
    const Sizes load = loads(drawn, devices);
    if (keeps_within(load, drawn.capacities)) {
      found.fits = true;
      if (std::is_sorted(devices.begin(), devices.end())) {
        const std::int64_t largest = *std::max_element(load.begin(), load.end());
        const std::int64_t squares = std::inner_product(load.begin(), load.end(), load.begin(), std::int64_t{0});
        const bool is_better = !found.fits_in_order || largest < found.smallest_largest;
        if (is_better || (largest == found.smallest_largest && squares < found.smallest_squares)) {
          found.smallest_largest = largest;
          found.smallest_squares = squares;
        }
        found.fits_in_order = true;
      }
    }
    std::size_t block = 0;
    while (block < devices.size() && ++devices[block] == count) {
      devices[block++] = 0;
    }
    if (block == devices.size()) {
      return found;
    }
  }
}

TEST(BalancedPartition, IsTheBestOfAllOrderedOnes) {
  std::mt19937 random(1);
  int fitting = 0;
  for (int round = 0; round < 2000; ++round) {
    const Drawn drawn = draw(random);
    const BruteForce expected = try_all(drawn);
    const auto partition = balanced_partition(drawn.blocks, drawn.capacities);
    ASSERT_EQ(partition.has_value(), expected.fits_in_order);
    if (!partition) {
      continue;
    }
    ++fitting;
    EXPECT_TRUE(std::is_sorted(partition->device_of_block.begin(), partition->device_of_block.end()));
    EXPECT_EQ(partition->loads, loads(drawn, partition->device_of_block));
    EXPECT_TRUE(keeps_within(partition->loads, drawn.capacities));
    const Sizes& load = partition->loads;
    EXPECT_EQ(*std::max_element(load.begin(), load.end()), expected.smallest_largest);
    EXPECT_EQ(std::inner_product(load.begin(), load.end(), load.begin(), std::int64_t{0}), expected.smallest_squares);
  }
  EXPECT_GT(fitting, 500);
}

struct WithModules {
  Drawn sizes;
  std::vector<Module> modules;
  double tolerance = 0;
};

WithModules draw_with_modules(std::mt19937& random) {
  WithModules drawn{draw(random), {}, std::uniform_int_distribution<int>(0, 2)(random) * 0.5};
  const std::size_t count = drawn.sizes.blocks.size();
  std::uniform_int_distribution<std::size_t> block(0, count == 0 ? 0 : count - 1);
  for (std::size_t left = count == 0 ? 0 : block(random); left > 0; --left) {
    const std::size_t first = block(random);
    const std::size_t last = block(random);
    drawn.modules.push_back({std::min(first, last), std::max(first, last) + 1});
  }
  return drawn;
}

std::int64_t count_split(const std::vector<Module>& modules, const std::vector<int>& devices) {
  return std::count_if(modules.begin(), modules.end(),
                       [&](const Module& module) { return devices[module.begin] != devices[module.end - 1]; });
}

// Modules split and squares of loads of the best partition in order with no load above `limit`.
std::pair<std::int64_t, std::int64_t> fewest_split(const WithModules& drawn, double limit) {
  std::pair<std::int64_t, std::int64_t> fewest(1000, 0);
  const int last_device = static_cast<int>(drawn.sizes.capacities.size()) - 1;
  std::vector<int> devices(drawn.sizes.blocks.size(), 0);
  for (;;) {
    const Sizes load = loads(drawn.sizes, devices);
    const auto largest = static_cast<double>(*std::max_element(load.begin(), load.end()));
    if (keeps_within(load, drawn.sizes.capacities) && largest <= limit) {
      const std::int64_t squares = std::inner_product(load.begin(), load.end(), load.begin(), std::int64_t{0});
      fewest = std::min(fewest, {count_split(drawn.modules, devices), squares});
    }
    // The next of those in order: the last block that can go to a later device, and all after it go there.
    std::size_t block = devices.size();
    while (block > 0 && devices[block - 1] == last_device) {
      --block;
    }
    if (block == 0) {
      return fewest;
    }
    std::fill(devices.begin() + static_cast<std::ptrdiff_t>(block) - 1, devices.end(), devices[block - 1] + 1);
  }
}

TEST(BalancedPartition, SplitsTheFewestModules) {
  std::mt19937 random(3);
  int above_the_smallest = 0;
  for (int round = 0; round < 2000; ++round) {
    const WithModules drawn = draw_with_modules(random);
    const BruteForce all = try_all(drawn.sizes);
    const auto partition =
        balanced_partition(drawn.sizes.blocks, drawn.sizes.capacities, drawn.modules, drawn.tolerance);
    ASSERT_EQ(partition.has_value(), all.fits_in_order);
    if (!partition || drawn.sizes.blocks.empty()) {
      continue;
    }
    const Sizes& blocks = drawn.sizes.blocks;
    const auto total = static_cast<double>(std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0}));
    const double mean = total / static_cast<double>(drawn.sizes.capacities.size());
    const auto largest_block = static_cast<double>(*std::max_element(blocks.begin(), blocks.end()));
    const double near = (1 + drawn.tolerance) * std::max(mean, largest_block);
    const double limit = std::max(static_cast<double>(all.smallest_largest), near);
    const Sizes& load = partition->loads;
    const auto [split, squares] = fewest_split(drawn, limit);
    EXPECT_TRUE(std::is_sorted(partition->device_of_block.begin(), partition->device_of_block.end()));
    EXPECT_TRUE(keeps_within(load, drawn.sizes.capacities));
    EXPECT_LE(static_cast<double>(*std::max_element(load.begin(), load.end())), limit);
    EXPECT_EQ(count_split(drawn.modules, partition->device_of_block), split);
    EXPECT_EQ(std::inner_product(load.begin(), load.end(), load.begin(), std::int64_t{0}), squares);
    above_the_smallest += *std::max_element(load.begin(), load.end()) > all.smallest_largest ? 1 : 0;
  }
  EXPECT_GT(above_the_smallest, 20);
}

TEST(BalancedPartition, CutsBetweenLayersWhereThatIsEvenEnough) {
  const Sizes halves(8, 50);
  const std::vector<Module> layers = {{0, 2}, {2, 4}, {4, 6}, {6, 8}};
  const Sizes room(3, 1000);
  const auto smallest = balanced_partition(halves, room, layers);
  EXPECT_EQ(*std::max_element(smallest->loads.begin(), smallest->loads.end()), 150);
  EXPECT_EQ(count_split(layers, smallest->device_of_block), 1);
  const auto whole = balanced_partition(halves, room, layers, 0.5);
  EXPECT_EQ(*std::max_element(whole->loads.begin(), whole->loads.end()), 200);
  EXPECT_EQ(count_split(layers, whole->device_of_block), 0);
}

TEST(BalancedPartition, SharesOutEqualLayersEvenly) {
  const auto partition = balanced_partition(Sizes(10, 7), Sizes(4, 1000));
  ASSERT_TRUE(partition);
  EXPECT_EQ(*std::max_element(partition->loads.begin(), partition->loads.end()), 21);
  EXPECT_EQ(*std::min_element(partition->loads.begin(), partition->loads.end()), 14);
}

TEST(BalancedPartition, TakesLargeModels) {
  const auto partition = balanced_partition(Sizes(3000, std::int64_t{1} << 30), Sizes(8, std::int64_t{1} << 50));
  ASSERT_TRUE(partition);
  EXPECT_EQ(partition->loads, Sizes(8, std::int64_t{375} << 30));
}

TEST(AnyFit, FindsOneExactlyWhereThereIsOne) {
  std::mt19937 random(2);
  int out_of_order = 0;
  for (int round = 0; round < 2000; ++round) {
    const Drawn drawn = draw(random);
    const BruteForce expected = try_all(drawn);
    const auto partition = any_fit(drawn.blocks, drawn.capacities, kEnoughSteps);
    ASSERT_EQ(partition.has_value(), expected.fits);
    if (!partition) {
      continue;
    }
    EXPECT_EQ(partition->loads, loads(drawn, partition->device_of_block));
    EXPECT_TRUE(keeps_within(partition->loads, drawn.capacities));
    out_of_order += expected.fits_in_order ? 0 : 1;
  }
  EXPECT_GT(out_of_order, 30);
}

TEST(AnyFit, GivesUpAfterSoManySteps) {
  EXPECT_TRUE(any_fit({1, 1, 1}, {2, 1}, 3));
  EXPECT_FALSE(any_fit({1, 1, 1}, {2, 1}, 2));
}

TEST(AnyFit, SeesAtOnceThatThereIsTooLittleRoom) {
  EXPECT_FALSE(any_fit(Sizes(10'000, 3), {100, 100}, kEnoughSteps));
}

TEST(Partition, OfNothingIsEmpty) {
  EXPECT_THAT(balanced_partition({}, {5})->device_of_block, IsEmpty());
  EXPECT_THAT(any_fit({}, {5, 5}, 0)->loads, ElementsAre(0, 0));
}

TEST(Partition, RefusesNegativeSizesAndNoDevice) {
  EXPECT_THAT([] { balanced_partition({1, -2}, {5}); }, ThrowsMessage<InvalidArgument>(HasSubstr("-2 bytes")));
  EXPECT_THAT([] { any_fit({1}, {-5}, 1); }, ThrowsMessage<InvalidArgument>(HasSubstr("-5 bytes")));
  EXPECT_THAT([] { balanced_partition({1}, {}); }, ThrowsMessage<InvalidArgument>(HasSubstr("no device")));
}

TEST(Partition, RefusesModulesThatAreNotAmongTheBlocks) {
  for (const Module& module : {Module{0, 3}, Module{1, 1}, Module{2, 1}}) {
    EXPECT_THAT([&] { balanced_partition({1, 1}, {5}, {module}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("module")));
  }
  EXPECT_THAT([] { balanced_partition({1}, {5}, {}, -0.1); }, ThrowsMessage<InvalidArgument>(HasSubstr("tolerance")));
}

}  // namespace
}  // namespace accelerate_cpp::placement
