// On the CPU: by ATen's operations, and by the kernels on a double of CUDA.
#include "torch_bridge/device_statistics.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <string>

#include "core/base/error.h"
#include "core/cuda/on_cuda_double.h"
#include "torch_bridge/gradient_scaling.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

using cuda::testing::cuda_double;

struct Case {
  at::ScalarType dtype;
  bool kernels;
};

class DeviceStatisticsTest : public ::testing::TestWithParam<Case> {
 protected:
  DeviceStatisticsTest() { cuda_double().reset(); }
  ~DeviceStatisticsTest() override { EXPECT_THAT(cuda_double().problems, ::testing::IsEmpty()); }

  // Two buckets: of the slots 0..6 and 32..20032, with numbers between them that belong to none; and of one slot.
  DeviceStatistics statistics() {
    const DType dtype = dtype_of(memory_[0]);
    return {{{dtype, 20040, {{0, 7}, {32, 20000}}}, {dtype, 16, {{0, 16}}}}, memory_, kernels()};
  }

  static std::shared_ptr<const cuda::LoadedSlotKernels> kernels() {
    if (!GetParam().kernels) {
      return nullptr;
    }
    return std::make_shared<const cuda::LoadedSlotKernels>(
        std::make_shared<const cuda::DriverApi>(ACCELERATE_CUDA_DOUBLE), cuda::KernelCompiler(ACCELERATE_CUDA_DOUBLE),
        0);
  }

  at::Tensor slot(std::int64_t offset, std::int64_t count) const { return memory_[0].narrow(0, offset, count); }

  static void expect_row(const std::optional<DeviceRow>& row, const at::Tensor& slot) {
    ASSERT_TRUE(row);
    const amp::GradientStatistics expected = amp::measure_gradients({slot})[0];
    const at::Tensor found = row->tensor();
    ASSERT_EQ(found.numel(), 2);
    EXPECT_NEAR(found[0].item<double>(), expected.sum_of_squares, 1e-6 * expected.sum_of_squares);
    EXPECT_EQ(found[1].item<double>(), static_cast<double>(expected.num_non_finite));
  }

  std::vector<at::Tensor> memory_{at::arange(20040, GetParam().dtype).div_(20000).sub_(0.5),
                                  at::arange(16, GetParam().dtype)};
};

TEST_P(DeviceStatisticsTest, AreThoseThatTheHostFinds) {
  DeviceStatistics all = statistics();
  all.begin_round();
  all.measure(1, 1.0);
  all.measure(0, 1.0);
  expect_row(all.row(0, 0), slot(0, 7));
  expect_row(all.row(0, 1), slot(32, 20000));
  expect_row(all.row(1, 0), memory_[1]);
}

TEST_P(DeviceStatisticsTest, AreOfTheProducts) {
  DeviceStatistics all = statistics();
  const at::Tensor before = memory_[0].clone();
  all.begin_round();
  all.measure(0, 0.25);
  EXPECT_TRUE(at::equal(slot(0, 7), before.narrow(0, 0, 7).mul(0.25)));
  EXPECT_TRUE(at::equal(slot(32, 20000), before.narrow(0, 32, 20000).mul(0.25)));
  expect_row(all.row(0, 1), slot(32, 20000));
}

TEST_P(DeviceStatisticsTest, CountWhatIsNotFiniteInItsSlotAlone) {
  memory_[0][10].fill_(std::nan(""));  // between the slots
  memory_[0][40].fill_(std::numeric_limits<double>::infinity());
  memory_[0][50].fill_(std::nan(""));
  DeviceStatistics all = statistics();
  all.begin_round();
  all.measure(0, 1.0);
  expect_row(all.row(0, 0), slot(0, 7));
  const at::Tensor found = all.row(0, 1)->tensor();
  EXPECT_FALSE(std::isfinite(found[0].item<double>()));
  EXPECT_EQ(found[1].item<double>(), GetParam().kernels ? 2.0 : 1.0);
}

TEST_P(DeviceStatisticsTest, ArePartOfOneRoundAndStayAsTheyWere) {
  DeviceStatistics all = statistics();
  EXPECT_FALSE(all.row(0, 0));
  all.begin_round();
  all.measure(0, 1.0);
  EXPECT_FALSE(all.row(1, 0));
  const at::Tensor kept = all.row(0, 1)->tensor();
  const at::Tensor copy = kept.clone();
  all.begin_round();
  EXPECT_FALSE(all.row(0, 1));
  memory_[0].mul_(2);
  all.measure(0, 1.0);
  EXPECT_TRUE(at::equal(kept, copy));
  EXPECT_FALSE(at::equal(all.row(0, 1)->tensor(), copy));
}

TEST_P(DeviceStatisticsTest, TakeTwoKernelsForABucketWhereThereAreKernels) {
  DeviceStatistics all = statistics();
  EXPECT_EQ(all.in_one_pass(), GetParam().kernels);
  all.begin_round();
  all.measure(0, 0.5);
  EXPECT_EQ(cuda_double().launches.size(), GetParam().kernels ? 2u : 0u);
  if (GetParam().kernels) {
    EXPECT_THAT(cuda_double().launches[0].kernel, ::testing::StartsWith("scale_"));
    EXPECT_EQ(cuda_double().launches[0].num_blocks, 3u);
    EXPECT_EQ(cuda_double().launches[1].kernel, "combine_chunks");
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceStatisticsTest,
                         ::testing::Values(Case{at::kFloat, false}, Case{at::kFloat, true}, Case{at::kDouble, false},
                                           Case{at::kDouble, true}, Case{at::kHalf, false}, Case{at::kHalf, true},
                                           Case{at::kBFloat16, false}, Case{at::kBFloat16, true}),
                         [](const auto& instance) {
                           return std::string(c10::toString(instance.param.dtype)) +
                                  (instance.param.kernels ? "ByKernels" : "ByAten");
                         });

TEST(DeviceStatisticsOfNothing, HaveNoRows) {
  DeviceStatistics none({}, {}, nullptr);
  none.begin_round();
  const at::Tensor memory = at::zeros({0});
  DeviceStatistics empty({{DType::kFloat32, 0, {}}}, {memory}, nullptr);
  empty.begin_round();
  empty.measure(0, 1.0);
  EXPECT_THROW(empty.row(0, 0), InternalError);
}

}  // namespace
}  // namespace accelerate_cpp::grad
