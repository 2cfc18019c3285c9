// The kernels, run on the host, against what the host computes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/amp/gradient_epilogue.h"
#include "core/cuda/grid_on_threads.h"
#include "core/cuda/slot_kernels.h"

namespace accelerate_cpp::cuda {
namespace {

using amp::GradientStatistics;

constexpr double kFactor = 0.375;

struct Format {
  DType dtype;
  void (*measure)(void* bucket, const Chunk* chunks, double factor, Partial* partials);
  void (*scale)(void* bucket, const Chunk* chunks, double factor, Partial* partials);
};

class SlotKernels : public ::testing::TestWithParam<Format> {
 protected:
  std::size_t size_bytes() const { return element_size(GetParam().dtype); }

  // Numbers of both signs, in the dtype.
  std::vector<std::byte> numbers(std::size_t count) const {
    std::vector<std::byte> bytes(count * size_bytes());
    for (std::size_t i = 0; i < count; ++i) {
      set(bytes, i, (static_cast<double>(i * 7919 % 1009) - 500.0) / 64.0);
    }
    return bytes;
  }

  void set(std::vector<std::byte>& bytes, std::size_t index, double value) const {
    void* const place = bytes.data() + index * size_bytes();
    switch (GetParam().dtype) {
      case DType::kFloat32:
        *static_cast<float*>(place) = static_cast<float>(value);
        break;
      case DType::kFloat64:
        *static_cast<double*>(place) = value;
        break;
      case DType::kFloat16:
        *static_cast<Float16*>(place) = to_float16(static_cast<float>(value));
        break;
      default:
        *static_cast<BFloat16*>(place) = to_bfloat16(static_cast<float>(value));
    }
  }

  MemoryView view(std::vector<std::byte>& bytes, std::size_t offset, std::size_t count) const {
    return {bytes.data() + offset * size_bytes(), count, GetParam().dtype};
  }
};

Partial take_one(void (*kernel)(void*, const Chunk*, double, Partial*), std::vector<std::byte>& bytes,
                 const Chunk& chunk) {
  Partial partial{-1.0, 99};
  testing::launch(1, kernel, bytes.data(), &chunk, kFactor, &partial);
  return partial;
}

TEST_P(SlotKernels, MeasureAsTheHostDoes) {
  // None, fewer than a row, rows and a rest, more than the threads take at once, and a place that is not aligned.
  for (const Chunk chunk : {Chunk{0, 0, 0}, Chunk{0, 3, 0}, Chunk{16, 4097, 0}, Chunk{0, 16384, 0}, Chunk{1, 600, 0}}) {
    std::vector<std::byte> bytes = numbers(17000);
    const std::vector<std::byte> before = bytes;
    const Partial found = take_one(GetParam().measure, bytes, chunk);
    const GradientStatistics expected = amp::measure_gradient(view(bytes, chunk.offset, chunk.count));
    EXPECT_NEAR(found.sum_of_squares, expected.sum_of_squares, 1e-13 * expected.sum_of_squares) << chunk.count;
    EXPECT_EQ(found.num_non_finite, 0u);
    EXPECT_EQ(bytes, before);
  }
}

TEST_P(SlotKernels, MultiplyWithTheSameBitsAsTheHost) {
  for (const Chunk chunk : {Chunk{16, 4097, 0}, Chunk{1, 600, 0}}) {
    std::vector<std::byte> bytes = numbers(17000);
    std::vector<std::byte> expected = bytes;
    const Partial found = take_one(GetParam().scale, bytes, chunk);
    amp::scale_gradient(view(expected, chunk.offset, chunk.count), kFactor);
    EXPECT_EQ(bytes, expected);
    // Of what is stored, so that whoever measures it later finds the same.
    const GradientStatistics statistics = amp::measure_gradient(view(expected, chunk.offset, chunk.count));
    EXPECT_NEAR(found.sum_of_squares, statistics.sum_of_squares, 1e-13 * statistics.sum_of_squares);
  }
}

TEST_P(SlotKernels, CountWhatIsNotFinite) {
  std::vector<std::byte> bytes = numbers(2000);
  for (const auto& [index, value] :
       {std::pair(5, std::nan("")), std::pair(900, HUGE_VAL), std::pair(1999, -HUGE_VAL)}) {
    set(bytes, static_cast<std::size_t>(index), value);
  }
  for (const auto kernel : {GetParam().measure, GetParam().scale}) {
    const Partial found = take_one(kernel, bytes, {0, 2000, 0});
    EXPECT_EQ(found.num_non_finite, 3u);
    EXPECT_FALSE(std::isfinite(found.sum_of_squares));
  }
}

TEST_P(SlotKernels, TakeEachChunkForItself) {
  std::vector<std::byte> bytes = numbers(4096);
  const std::vector<Chunk> chunks{{0, 100, 0}, {128, 1000, 0}, {2048, 2048, 0}};
  std::vector<Partial> partials(3);
  testing::launch(3, GetParam().measure, bytes.data(), chunks.data(), 1.0, partials.data());
  for (std::size_t c = 0; c < 3; ++c) {
    const double expected = amp::measure_gradient(view(bytes, chunks[c].offset, chunks[c].count)).sum_of_squares;
    EXPECT_NEAR(partials[c].sum_of_squares, expected, 1e-13 * expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, SlotKernels,
                         ::testing::Values(Format{DType::kFloat32, measure_float32, scale_float32},
                                           Format{DType::kFloat64, measure_float64, scale_float64},
                                           Format{DType::kFloat16, measure_float16, scale_float16},
                                           Format{DType::kBFloat16, measure_bfloat16, scale_bfloat16}),
                         [](const auto& instance) { return std::string(name(instance.param.dtype)); });

TEST(SlotKernels, SquareWhatAFloatCouldNotHold) {
  std::vector<float> values(300, 1e30f);
  const Chunk chunk{0, 300, 0};
  Partial found{};
  testing::launch(1, measure_float32, values.data(), &chunk, 1.0, &found);
  EXPECT_NEAR(found.sum_of_squares, 3e62, 1e56);
  EXPECT_EQ(found.num_non_finite, 0u);
}

TEST(SlotKernels, AddUpTheChunksOfEachSlot) {
  std::vector<Partial> partials;
  for (unsigned c = 0; c < 700; ++c) {
    partials.push_back({1.0 + c, c % 3});
  }
  // One chunk, none, and more than there are threads.
  const std::vector<unsigned> first_chunks{0, 1, 1, 700};
  std::vector<double> rows(6, -1.0);
  testing::launch(3, combine_chunks, partials.data(), first_chunks.data(), rows.data());
  EXPECT_THAT(rows, ::testing::ElementsAre(1.0, 0.0, 0.0, 0.0, 700.0 * 701 / 2 - 1, 699.0));
}

}  // namespace
}  // namespace accelerate_cpp::cuda
