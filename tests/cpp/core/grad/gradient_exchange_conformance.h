// What every grad::GradientExchange does. The reference is one process that has the samples of all ranks in one batch,
// and takes the mean of their gradients.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "core/comm/operands.h"
#include "core/comm/ranks.h"
#include "core/grad/gradient_exchange.h"

namespace accelerate_cpp::comm::testing {

struct Sample {
  int rank;
  int number;
};

// The gradient of one sample for element `i` of a slot; none for slots that its rank does not use in this round.
inline double gradient_of(const Sample& sample, int round, std::size_t slot, std::size_t i) {
  const bool used = (slot + static_cast<std::size_t>(sample.rank + round)) % 3 != 0;
  return used
             ? static_cast<double>((i * 7 + static_cast<std::size_t>(5 * sample.rank + 3 * sample.number + round)) % 11)
             : 0.0;
}

// In rounds with weights ranks have different numbers of samples, some none, and weigh as many; in the others one each.
inline int num_samples(int rank, int round, bool weighted) {
  return weighted ? (rank + round) % 4 : 1;
}

inline std::vector<Sample> whole_batch(int size, int round, bool weighted) {
  std::vector<Sample> batch;
  for (int rank = 0; rank < size; ++rank) {
    for (int number = 0; number < num_samples(rank, round, weighted); ++number) {
      batch.push_back({rank, number});
    }
  }
  return batch;
}

// Fills and publishes the buckets, every other time in reverse.
inline void publish_own_samples(grad::GradientExchange& exchange, const std::vector<grad::BucketSpec>& specs, int rank,
                                int round, bool weighted) {
  for (std::size_t k = 0; k < specs.size(); ++k) {
    const std::size_t b = (rank + round) % 2 == 1 ? specs.size() - 1 - k : k;
    const MemoryView view = exchange.bucket(b);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 64, 0u);
    for (std::size_t slot = 0; slot < specs[b].slots.size(); ++slot) {
      const auto [offset, count] = specs[b].slots[slot];
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (int number = 0; number < num_samples(rank, round, weighted); ++number) {
          sum += gradient_of({rank, number}, round, slot, i);
        }
        put(view, offset + i, sum);
      }
      exchange.used_slots(b)[slot] = (slot + static_cast<std::size_t>(rank + round)) % 3 != 0;
    }
    exchange.publish(b);
    exchange.progress();
  }
}

inline void check_averages(grad::GradientExchange& exchange, const std::vector<grad::BucketSpec>& specs, int size,
                           int round, bool weighted) {
  const std::vector<Sample> batch = whole_batch(size, round, weighted);
  for (std::size_t b = 0; b < specs.size(); ++b) {
    for (std::size_t slot = 0; slot < specs[b].slots.size(); ++slot) {
      const auto [offset, count] = specs[b].slots[slot];
      double squares = 0.0;
      std::size_t num_wrong = 0;
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (const Sample& sample : batch) {
          sum += gradient_of(sample, round, slot, i);
        }
        const double mean = batch.empty() ? 0.0 : sum / static_cast<double>(batch.size());
        const double found = get(exchange.bucket(b), offset + i);
        num_wrong += std::abs(found - mean) > 1e-6 * (1.0 + mean) ? 1 : 0;
        squares += found * found;
      }
      EXPECT_EQ(num_wrong, 0u) << "slot " << slot << " of bucket " << b << " in round " << round;
      bool used = false;
      for (int rank = 0; rank < size; ++rank) {
        used = used || (slot + static_cast<std::size_t>(rank + round)) % 3 != 0;
      }
      EXPECT_EQ(exchange.used_anywhere(b, slot), used) << "slot " << slot << " of bucket " << b;
      if (const auto statistics = exchange.statistics(b, slot)) {
        EXPECT_NEAR(statistics->sum_of_squares, squares, 1e-9 * squares) << "slot " << slot << " of bucket " << b;
        EXPECT_EQ(statistics->num_non_finite, 0u);
        const auto again = exchange.measure(b, slot, within(exchange.bucket(b), offset, count));
        EXPECT_EQ(again.sum_of_squares, statistics->sum_of_squares) << "to the last bit";
      }
    }
  }
  EXPECT_EQ(exchange.divisor(), static_cast<double>(batch.size()));
}

inline std::vector<grad::BucketSpec> conformance_buckets() {
  return {{DType::kFloat32, 100, {{0, 33}, {48, 50}}},
          {DType::kFloat64, 70000, {{0, 1}, {8, 60000}, {60008, 9992}}},
          {DType::kFloat32, 1, {{0, 1}}}};
}

// `exchange` has conformance_buckets(), in host memory. All ranks call it.
inline void check_gradient_exchange(grad::GradientExchange& exchange, int rank, int size, bool takes_weights = true) {
  const std::vector<grad::BucketSpec> specs = conformance_buckets();
  for (int round = 0; round < 6; ++round) {
    const bool weighted = takes_weights && round % 2 == 1;
    const bool measures = round % 3 != 0;
    if (weighted) {
      exchange.begin({num_samples(rank, round, true), measures}, soon());
    } else if (measures) {
      exchange.begin({std::nullopt, true}, soon());
    }
    publish_own_samples(exchange, specs, rank, round, weighted);
    exchange.finish(soon());
    check_averages(exchange, specs, size, round, weighted);
  }
  EXPECT_THROW(exchange.begin({-1.0, false}, soon()), InvalidArgument);
  EXPECT_THROW(exchange.bucket(specs.size()), InternalError);
  EXPECT_THROW(exchange.used_slots(specs.size()), InternalError);
  EXPECT_THROW(exchange.used_anywhere(0, 2), InternalError);
  EXPECT_THROW(exchange.statistics(0, 2), InternalError);
  EXPECT_THROW(exchange.finish(soon()), InternalError) << "nothing is published";
  exchange.publish(1);
  EXPECT_THROW(exchange.publish(1), InternalError);
  exchange.publish(0);
  exchange.publish(2);
  exchange.finish(soon());
}

}  // namespace accelerate_cpp::comm::testing
