// On the CPU, with a sum that is put off until it is awaited, as an accelerator does it.
#include "torch_bridge/device_gradient_exchange.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/cuda/on_cuda_double.h"
#include "core/grad/gradient_exchange_conformance.h"
#include "torch_bridge/reducers_of_threads.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::soon;
using testing::Communicator;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

at::Tensor parameter(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::full({count}, 1, dtype).set_requires_grad(true);
}

DeviceGroup group_by(const Communicator& communicator, std::shared_ptr<const cuda::LoadedSlotKernels> kernels = {}) {
  const auto sum = [communicator](const at::Tensor& bucket) {
    return [communicator, bucket] { communicator->all_reduce(view_of(bucket), comm::ReduceOp::kSum, soon()); };
  };
  return {sum, [] {}, std::move(kernels)};
}

// Two buckets, of two parameters and of one.
struct Exchange {
  explicit Exchange(Communicator communicator, std::shared_ptr<const cuda::LoadedSlotKernels> kernels = nullptr)
      : of(*communicator, {{DType::kFloat32, 32, {{0, 4}, {16, 2}}}, {DType::kFloat32, 16, {{0, 5}}}},
           {{parameter(4), parameter(2)}, {parameter(5)}}, group_by(communicator, std::move(kernels))) {}

  float& value(std::size_t bucket, std::size_t index) { return static_cast<float*>(of.bucket(bucket).data)[index]; }

  // One round in which this rank has `gradient` at one place of each bucket.
  void round(float gradient, const grad::RoundOptions& options = {}) {
    of.begin(options, soon());
    value(0, 17) = value(1, 4) = gradient;
    of.publish(1);
    of.publish(0);
    of.finish(soon());
  }

  DeviceGradientExchange of;
};

std::shared_ptr<const cuda::LoadedSlotKernels> kernels_of_double() {
  return std::make_shared<const cuda::LoadedSlotKernels>(
      std::make_shared<const cuda::DriverApi>(ACCELERATE_CUDA_DOUBLE), cuda::KernelCompiler(ACCELERATE_CUDA_DOUBLE), 0);
}

double squares(const DeviceGradientExchange& exchange, std::size_t bucket, std::size_t slot) {
  return exchange.device_statistics(bucket, slot)->tensor()[0].item<double>();
}

TEST(DeviceGradientExchanges, MeasureTheAveragesWhereTheyAreWhenTheyAreAskedTo) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    Exchange exchange(communicator);
    exchange.round(static_cast<float>(rank + 1));
    EXPECT_FALSE(exchange.of.device_statistics(0, 1));
    exchange.round(static_cast<float>(rank + 1), {{}, true});
    EXPECT_FALSE(exchange.of.statistics(0, 1));
    EXPECT_FLOAT_EQ(squares(exchange.of, 0, 1), 2.25);
    EXPECT_EQ(squares(exchange.of, 0, 0), 0.0);
    EXPECT_FLOAT_EQ(squares(exchange.of, 1, 0), 2.25);
    exchange.round(2.0f);
    EXPECT_FALSE(exchange.of.device_statistics(0, 1));
  });
}

TEST(DeviceGradientExchanges, AverageAndMeasureInOnePassWhereThereAreKernels) {
  cuda::testing::cuda_double().reset();
  const auto kernels = kernels_of_double();
  run_ranks(2, [&](const Communicator& communicator, int rank) {
    Exchange exchange(communicator, kernels);
    // Whether one rank wants figures does not matter to the others.
    exchange.round(static_cast<float>(rank + 1), {{}, rank == 0});
    EXPECT_FLOAT_EQ(exchange.value(0, 17), 1.5f);
    EXPECT_FLOAT_EQ(squares(exchange.of, 0, 1), 2.25);
    exchange.round(static_cast<float>(rank + 1), {rank == 0 ? 3.0 : 1.0, true});
    EXPECT_FLOAT_EQ(exchange.value(0, 17), (1.0f + 2.0f) / 4);
    EXPECT_FLOAT_EQ(squares(exchange.of, 0, 1), 0.5625);
    exchange.round(static_cast<float>(rank + 1), {1.0, false});
    EXPECT_FALSE(exchange.of.device_statistics(0, 1));
  });
  std::map<std::string, int> launches;
  for (const cuda::testing::Launch& launch : cuda::testing::cuda_double().launches) {
    ++launches[launch.kernel];
  }
  // Of two ranks, two buckets each.
  EXPECT_EQ(launches,
            (std::map<std::string, int>{{"scale_float32", 4}, {"measure_float32", 4}, {"combine_chunks", 8}}));
  EXPECT_THAT(cuda::testing::cuda_double().problems, ElementsAre());
}

TEST(DeviceGradientExchanges, DoNotSumHalvesThatAreNotYetDivided) {
  run_ranks(2, [&](const Communicator& communicator, int) {
    DeviceGradientExchange exchange(*communicator, {{DType::kFloat16, 32, {{0, 4}}}}, {{parameter(4, at::kHalf)}},
                                    group_by(communicator, kernels_of_double()));
    auto* const values = static_cast<Float16*>(exchange.bucket(0).data);
    values[0] = to_float16(60000.0f);
    exchange.begin({{}, true}, soon());
    exchange.publish(0);
    exchange.finish(soon());
    EXPECT_EQ(to_float(values[0]), 60000.0f);
    EXPECT_EQ(squares(exchange, 0, 0), 3.6e9);
  });
}

TEST(DeviceGradientExchanges, AverageOverTheRanks) {
  for (int size = 1; size <= 3; ++size) {
    run_ranks(size, [&](const Communicator& communicator, int rank) {
      Exchange exchange(communicator);
      for (const float step : {1.0f, 4.0f}) {
        exchange.round(step * static_cast<float>(rank + 1));
        const float expected = step * static_cast<float>(size + 1) / 2;
        EXPECT_FLOAT_EQ(exchange.value(0, 17), expected);
        EXPECT_FLOAT_EQ(exchange.value(1, 4), expected);
        EXPECT_EQ(exchange.value(0, 0), 0.0f);
        EXPECT_EQ(exchange.of.divisor(), size);
      }
    });
  }
}

TEST(DeviceGradientExchanges, ConformToGradientExchange) {
  for (int size = 1; size <= 3; ++size) {
    run_ranks(size, [&](const Communicator& communicator, int rank) {
      DeviceGradientExchange exchange(
          *communicator, comm::testing::conformance_buckets(),
          {{parameter(33), parameter(50)},
           {parameter(1, at::kDouble), parameter(60000, at::kDouble), parameter(9992, at::kDouble)},
           {parameter(1)}},
          group_by(communicator));
      comm::testing::check_gradient_exchange(exchange, rank, size);
    });
  }
}

TEST(DeviceGradientExchanges, StartBucketsInOrderWhicheverIsReadyFirst) {
  comm::testing::run_threads(1, [](comm::Store& store, int rank) {
    const Communicator communicator = comm::ShmCommunicator::connect(store, rank, 1, soon(), {});
    std::vector<std::int64_t> started;
    const auto note = [&](const at::Tensor& bucket) {
      started.push_back(bucket.numel());
      return [] {};
    };
    DeviceGradientExchange exchange(*communicator, {{DType::kFloat32, 16, {{0, 4}}}, {DType::kFloat64, 8, {{0, 5}}}},
                                    {{parameter(4)}, {parameter(5, at::kDouble)}}, {note, [] {}, nullptr});
    exchange.publish(1);
    EXPECT_THAT(started, ElementsAre());
    exchange.publish(0);
    EXPECT_THAT(started, ElementsAre(16, 8));
    exchange.finish(soon());
    exchange.begin({}, soon());
    exchange.publish(0);
    EXPECT_THAT(started, ElementsAre(16, 8, 16));
  });
}

TEST(DeviceGradientExchanges, TellWhenOthersMayCompleteARoundThatThisRankCannot) {
  comm::testing::run_threads(1, [](comm::Store& store, int rank) {
    const Communicator communicator = comm::ShmCommunicator::connect(store, rank, 1, soon(), {});
    const auto fail = [](const at::Tensor&) { return [] { throw SystemFailure("a sum", 5); }; };
    DeviceGradientExchange exchange(*communicator, {{DType::kFloat32, 16, {{0, 4}}}}, {{parameter(4)}},
                                    {fail, [] {}, nullptr});
    exchange.publish(0);
    EXPECT_FALSE(exchange.completing());
    EXPECT_THROW(exchange.finish(soon()), SystemFailure);
    EXPECT_TRUE(exchange.completing());
    exchange.begin({}, soon());
    EXPECT_FALSE(exchange.completing());
  });
}

TEST(DeviceGradientExchanges, LeaveNobodyWaitingForARankThatFailed) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    Exchange exchange(communicator);
    if (rank == 1) {
      communicator->abort("out of memory");
      return;
    }
    EXPECT_THAT([&] { exchange.round(1.0f); }, ThrowsMessage<PeerLost>(HasSubstr("out of memory")));
  });
}

}  // namespace
}  // namespace accelerate_cpp::grad
