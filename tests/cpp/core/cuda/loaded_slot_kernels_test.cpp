#include "core/cuda/loaded_slot_kernels.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/cuda/on_cuda_double.h"

namespace accelerate_cpp::cuda::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Stream stream() {
  static int one = 0;
  return reinterpret_cast<Stream>(&one);
}

class LoadedSlotKernelsTest : public OnCudaDouble {
 protected:
  LoadedSlotKernels load() const {
    return {std::make_shared<const DriverApi>(ACCELERATE_CUDA_DOUBLE), KernelCompiler(ACCELERATE_CUDA_DOUBLE), 0};
  }
};

// Two slots, of 3 and of 20000 elements.
template <class T>
struct Bucket {
  explicit Bucket(T value) : elements(20064, value) {}

  SlotPass pass(DType dtype, std::optional<double> factor = {}) {
    return {dtype, elements.data(), chunks.data(), 3, first_chunks.data(), 2, partials.data(), rows.data(), factor};
  }

  std::vector<T> elements;
  std::vector<Chunk> chunks{{0, 3, 0}, {64, kChunkElements, 0}, {64 + kChunkElements, 20000 - kChunkElements, 0}};
  std::vector<unsigned> first_chunks{0, 1, 3};
  std::vector<Partial> partials{3};
  std::vector<double> rows = std::vector<double>(4, -1.0);
};

TEST_F(LoadedSlotKernelsTest, AreCompiledForTheDeviceAndLoadedOnce) {
  cuda_double().capability = 80;
  EXPECT_EQ(load().architecture(), "sm_80");
  EXPECT_THAT(cuda_double().loaded, ElementsAre("image for sm_80"));
}

TEST_F(LoadedSlotKernelsTest, MeasureTheSlotsOfEachDtype) {
  const LoadedSlotKernels kernels = load();
  Bucket<float> floats(2.0f);
  floats.elements[1] = HUGE_VALF;
  kernels.run(floats.pass(DType::kFloat32), stream());
  EXPECT_THAT(floats.rows, ElementsAre(HUGE_VAL, 1.0, 80000.0, 0.0));
  Bucket<double> doubles(2.0);
  kernels.run(doubles.pass(DType::kFloat64), stream());
  EXPECT_THAT(doubles.rows, ElementsAre(12.0, 0.0, 80000.0, 0.0));
  Bucket<Float16> halves(to_float16(2.0f));
  kernels.run(halves.pass(DType::kFloat16), stream());
  EXPECT_THAT(halves.rows, ElementsAre(12.0, 0.0, 80000.0, 0.0));
  Bucket<BFloat16> brains(to_bfloat16(2.0f));
  kernels.run(brains.pass(DType::kBFloat16), stream());
  EXPECT_THAT(brains.rows, ElementsAre(12.0, 0.0, 80000.0, 0.0));
}

TEST_F(LoadedSlotKernelsTest, MultiplyWhenThereIsAFactor) {
  const LoadedSlotKernels kernels = load();
  Bucket<float> bucket(2.0f);
  kernels.run(bucket.pass(DType::kFloat32, 0.5), stream());
  EXPECT_THAT(bucket.rows, ElementsAre(3.0, 0.0, 20000.0, 0.0));
  EXPECT_EQ(bucket.elements[2], 1.0f);
  EXPECT_EQ(bucket.elements[3], 2.0f);  // between the slots
  EXPECT_EQ(bucket.elements[64 + 19999], 1.0f);
}

TEST_F(LoadedSlotKernelsTest, RunOnTheStreamWithABlockPerChunkAndPerSlot) {
  const LoadedSlotKernels kernels = load();
  Bucket<float> bucket(2.0f);
  kernels.run(bucket.pass(DType::kFloat32), stream());
  ASSERT_EQ(cuda_double().launches.size(), 2u);
  EXPECT_EQ(cuda_double().launches[0].kernel, "measure_float32");
  EXPECT_EQ(cuda_double().launches[0].num_blocks, 3u);
  EXPECT_EQ(cuda_double().launches[1].kernel, "combine_chunks");
  EXPECT_EQ(cuda_double().launches[1].num_blocks, 2u);
  EXPECT_EQ(cuda_double().launches[1].stream, stream());
}

TEST_F(LoadedSlotKernelsTest, LaunchNoEmptyGrid) {
  const LoadedSlotKernels kernels = load();
  std::vector<unsigned> first_chunks{0, 0};
  std::vector<double> rows(2, -1.0);
  kernels.run({DType::kFloat32, nullptr, nullptr, 0, first_chunks.data(), 1, nullptr, rows.data(), {}}, stream());
  EXPECT_THAT(rows, ElementsAre(0.0, 0.0));
  kernels.run({DType::kFloat32, nullptr, nullptr, 0, first_chunks.data(), 0, nullptr, nullptr, {}}, stream());
}

TEST_F(LoadedSlotKernelsTest, RefuseIntegers) {
  const LoadedSlotKernels kernels = load();
  Bucket<float> bucket(2.0f);
  EXPECT_THAT(message_of<InvalidArgument>([&] { kernels.run(bucket.pass(DType::kInt32), stream()); }),
              HasSubstr("found int32"));
}

TEST_F(LoadedSlotKernelsTest, LetGoOfTheContextWhateverFails) {
  const LoadedSlotKernels kernels = load();
  Bucket<float> bucket(2.0f);
  cuda_double().failures["cuLaunchKernel"] = 719;
  EXPECT_THAT(message_of<SystemFailure>([&] { kernels.run(bucket.pass(DType::kFloat32), stream()); }),
              HasSubstr("cuLaunchKernel failed"));
  cuda_double().failures = {{"cuModuleLoadData", 209}};
  EXPECT_THAT(message_of<SystemFailure>([&] { load(); }), HasSubstr("cuModuleLoadData failed"));
}

}  // namespace
}  // namespace accelerate_cpp::cuda::testing
