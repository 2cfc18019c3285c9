#include "core/data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::data {
namespace {

using Order = std::vector<std::uint64_t>;

Order order_of(const Permutation& permutation) {
  Order order;
  for (std::uint64_t position = 0; position < permutation.size(); ++position) {
    order.push_back(permutation.at(position));
  }
  return order;
}

// Pearson's statistic of counts that should be equal, in standard deviations from its mean.
double excess_of(const std::vector<std::uint64_t>& counts) {
  double total = 0.0, statistic = 0.0;
  for (const std::uint64_t count : counts) {
    total += static_cast<double>(count);
  }
  const double expected = total / static_cast<double>(counts.size());
  for (const std::uint64_t count : counts) {
    statistic += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected) / expected;
  }
  const double degrees = static_cast<double>(counts.size()) - 1.0;
  return (statistic - degrees) / std::sqrt(2.0 * degrees);
}

TEST(Permutation, GivesEveryNumberOnce) {
  for (std::uint64_t size = 0; size < 300; ++size) {
    std::vector<int> seen(size, 0);
    for (const std::uint64_t number : order_of(Permutation(size, 7))) {
      ASSERT_LT(number, size);
      ++seen[number];
    }
    EXPECT_EQ(seen, std::vector<int>(size, 1)) << "size " << size;
  }
}

TEST(Permutation, IsTheSameForTheSameSeedAndTurn) {
  const Order order = order_of(Permutation(100, 3, 2));
  EXPECT_EQ(order, order_of(Permutation(100, 3, 2)));
  EXPECT_NE(order, order_of(Permutation(100, 4, 2)));
  EXPECT_NE(order, order_of(Permutation(100, 3, 1)));
  EXPECT_NE(order, order_of(Permutation(100, 3)));
}

// Saved positions are only worth what the order is: a later version must give the same one.
TEST(Permutation, NeverChangesFromVersionToVersion) {
  EXPECT_EQ(order_of(Permutation(8, 0)), (Order{2, 6, 5, 4, 3, 0, 1, 7}));
  EXPECT_EQ(order_of(Permutation(11, 42, 1)), (Order{2, 3, 6, 10, 8, 7, 4, 5, 1, 9, 0}));
}

TEST(Permutation, HasAnyLength) {
  const std::uint64_t sizes[] = {1, std::uint64_t{1} << 33, (std::uint64_t{1} << 62) + 1, ~std::uint64_t{0}};
  for (const std::uint64_t size : sizes) {
    const Permutation permutation(size, 5);
    for (const std::uint64_t position : {std::uint64_t{0}, size / 2, size - 1}) {
      EXPECT_LT(permutation.at(position), size);
    }
    EXPECT_THROW(permutation.at(size), InternalError);
  }
}

// All orders of a few numbers are equally likely, over consecutive seeds as over consecutive turns.
TEST(Permutation, FavoursNoOrder) {
  constexpr int kTimes = 500;
  std::uint64_t orders = 1;
  for (std::uint64_t size = 2; size <= 6; ++size) {
    orders *= size;
    for (const bool by_turn : {false, true}) {
      std::map<Order, std::uint64_t> counts;
      for (std::uint64_t draw = 0; draw < orders * kTimes; ++draw) {
        ++counts[order_of(by_turn ? Permutation(size, 1, draw) : Permutation(size, draw))];
      }
      EXPECT_EQ(counts.size(), orders);
      std::vector<std::uint64_t> of_each;
      for (const auto& [order, count] : counts) {
        of_each.push_back(count);
      }
      EXPECT_LT(std::abs(excess_of(of_each)), 5.0) << "size " << size << (by_turn ? ", turns" : ", seeds");
    }
  }
}

// Where a number stands says nothing of where it, or its neighbour, goes.
TEST(Permutation, FavoursNoPlaceAndNoNeighbour) {
  for (const std::uint64_t size : {std::uint64_t{10}, std::uint64_t{64}, std::uint64_t{100}}) {
    std::vector<std::uint64_t> places(size * size, 0), steps(size - 1, 0);
    for (std::uint64_t seed = 0; seed < 20000; ++seed) {
      const Order order = order_of(Permutation(size, seed));
      for (std::uint64_t position = 0; position < size; ++position) {
        ++places[position * size + order[position]];
        if (position > 0) {
          ++steps[(order[position] + size - order[position - 1]) % size - 1];
        }
      }
    }
    EXPECT_LT(std::abs(excess_of(places)), 6.0) << "places, size " << size;
    EXPECT_LT(std::abs(excess_of(steps)), 6.0) << "steps, size " << size;
  }
}

}  // namespace
}  // namespace accelerate_cpp::data
