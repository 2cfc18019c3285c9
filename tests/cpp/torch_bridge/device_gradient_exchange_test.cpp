// On the CPU, with a sum that is put off until it is awaited, as an accelerator does it.
#include "torch_bridge/device_gradient_exchange.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/shm/shm_communicator.h"
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

SumOverRanks sum_by(const Communicator& communicator) {
  return [communicator](const at::Tensor& bucket) {
    return [communicator, bucket] { communicator->all_reduce(view_of(bucket), comm::ReduceOp::kSum, soon()); };
  };
}

// Two buckets, of two parameters and of one.
struct Exchange {
  explicit Exchange(Communicator communicator)
      : of(*communicator, {{DType::kFloat32, 32, {{0, 4}, {16, 2}}}, {DType::kFloat32, 16, {{0, 5}}}},
           {{parameter(4), parameter(2)}, {parameter(5)}}, sum_by(communicator)) {}

  float& value(std::size_t bucket, std::size_t index) { return static_cast<float*>(of.bucket(bucket).data)[index]; }

  // One round in which this rank has `gradient` at one place of each bucket.
  void round(float gradient, const comm::RoundOptions& options = {}) {
    of.begin(options, soon());
    value(0, 17) = value(1, 4) = gradient;
    of.publish(1);
    of.publish(0);
    of.finish(soon());
  }

  DeviceGradientExchange of;
};

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

TEST(DeviceGradientExchanges, DivideByTheSumOfTheWeights) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    Exchange exchange(communicator);
    exchange.round(static_cast<float>(rank + 1), {rank == 0 ? 3.0 : 1.0, false});
    EXPECT_FLOAT_EQ(exchange.value(0, 17), (3.0f * 1 + 1.0f * 2) / 4);
    EXPECT_EQ(exchange.of.divisor(), 4.0);
    exchange.round(5.0f, {0.0, false});
    EXPECT_EQ(exchange.value(0, 17), 0.0f);
    EXPECT_EQ(exchange.of.divisor(), 0.0);
    exchange.round(static_cast<float>(rank));
    EXPECT_FLOAT_EQ(exchange.value(0, 17), 0.5f);
    EXPECT_EQ(exchange.of.divisor(), 2.0);
  });
}

TEST(DeviceGradientExchanges, TellWhatSlotsAnyRankHasUsed) {
  run_ranks(2, [](const Communicator& communicator, int rank) {
    Exchange exchange(communicator);
    exchange.of.used_slots(0)[rank] = 1;
    exchange.round(1.0f);
    EXPECT_TRUE(exchange.of.used_anywhere(0, 0) && exchange.of.used_anywhere(0, 1));
    EXPECT_FALSE(exchange.of.used_anywhere(1, 0));
  });
}

TEST(DeviceGradientExchanges, StartBucketsInOrderWhicheverIsReadyFirst) {
  comm::testing::run_threads(1, [](comm::Store& store, int rank) {
    const Communicator communicator = comm::ShmCommunicator::connect(store, rank, 1, soon(), {});
    std::vector<std::int64_t> started;
    DeviceGradientExchange exchange(*communicator, {{DType::kFloat32, 16, {{0, 4}}}, {DType::kFloat64, 8, {{0, 5}}}},
                                    {{parameter(4)}, {parameter(5, at::kDouble)}}, [&](const at::Tensor& bucket) {
                                      started.push_back(bucket.numel());
                                      return [] {};
                                    });
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
