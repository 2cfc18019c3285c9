#include "core/grad/sequential_gradient_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/solo.h"
#include "core/grad/one_of_two.h"

namespace accelerate_cpp::comm {

using namespace grad;
namespace {

using ::testing::ElementsAre;
using testing::soon;

// Notes what is started, and moves nothing.
class Recorded final : public SequentialGradientExchange {
 public:
  Recorded(std::size_t num_buckets, Communicator& communicator)
      : SequentialGradientExchange(communicator, std::vector<BucketSpec>(num_buckets, {DType::kFloat32, 1, {{0, 1}}})),
        memory_(num_buckets) {}

  std::vector<std::size_t> started;

 private:
  void* memory(std::size_t index) override { return &memory_[index]; }
  void start(std::size_t index) override { started.push_back(index); }
  double complete(MemoryView used, Deadline deadline) override {
    reduce_used(used, deadline);
    return sum_of_weights();
  }

  std::vector<float> memory_;
};

TEST(SequentialGradientExchange, StartsBucketsInOrderWhicheverIsReadyFirst) {
  SoloCommunicator communicator;
  Recorded exchange(3, communicator);
  exchange.publish(2);
  exchange.publish(1);
  EXPECT_THAT(exchange.started, ElementsAre());
  exchange.publish(0);
  EXPECT_THAT(exchange.started, ElementsAre(0, 1, 2));
}

TEST(SequentialGradientExchange, StartsAnewAfterARoundThatWasGivenUp) {
  SoloCommunicator communicator;
  Recorded exchange(2, communicator);
  exchange.publish(0);
  exchange.begin({}, soon());
  exchange.publish(1);
  exchange.publish(0);
  EXPECT_THAT(exchange.started, ElementsAre(0, 0, 1));
}

// The other rank weighs 2.5 and uses everything.
class WithAHeavierRank final : public testing::OneOfTwo {
 public:
  std::vector<std::string> reduced;

  void all_reduce_on_host(MemoryView data, ReduceOp op, const Call&) override {
    reduced.push_back(std::string(name(op)) + " of " + std::to_string(data.count));
    if (op == ReduceOp::kSum) {
      *static_cast<double*>(data.data) += 2.5;
    } else {
      *static_cast<std::uint8_t*>(data.data) = 1;
    }
  }
};

TEST(SequentialGradientExchange, TellsWeightsBeforeBucketsStartAndFlagsAtTheEnd) {
  WithAHeavierRank communicator;
  Recorded exchange(1, communicator);
  exchange.begin({0.5, false}, soon());
  EXPECT_THAT(communicator.reduced, ElementsAre("sum of 1"));
  exchange.publish(0);
  exchange.finish(soon());
  EXPECT_THAT(communicator.reduced, ElementsAre("sum of 1", "max of 1"));
  EXPECT_EQ(exchange.divisor(), 3.0);
  EXPECT_TRUE(exchange.used_anywhere(0, 0));
  exchange.publish(0);
  exchange.finish(soon());
  EXPECT_EQ(exchange.divisor(), 2.0) << "without weights, the number of ranks";
}

}  // namespace
}  // namespace accelerate_cpp::comm
