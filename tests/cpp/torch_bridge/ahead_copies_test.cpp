#include "torch_bridge/ahead_copies.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "core/base/error.h"
#include "torch_bridge/device_double.h"

namespace accelerate_cpp::offload {
namespace {

namespace device_double = testing::device_double;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const at::Device kDevice(at::kPrivateUse1, 0);

// Unit k has two tensors of k: one of 25 floats, and one of 50 half floats that is wanted in floats. 300 bytes.
std::vector<std::vector<Weight>> units(int count) {
  std::vector<std::vector<Weight>> units;
  for (int k = 0; k < count; ++k) {
    units.push_back({{at::full({25}, k, at::kFloat), at::kFloat}, {at::full({50}, k, at::kHalf), at::kFloat}});
  }
  return units;
}

class AheadCopiesTest : public ::testing::Test {
 protected:
  AheadCopiesTest() {
    device_double::set_room(std::numeric_limits<std::int64_t>::max());
    before_ = device_double::bytes_in_use();
    device_double::forget_peak();
  }
  ~AheadCopiesTest() override { device_double::hold_pool_copies(false); }

  std::int64_t peak() const { return device_double::peak_bytes() - before_; }
  std::int64_t in_use() const { return device_double::bytes_in_use() - before_; }

  std::int64_t before_ = 0;
};

TEST_F(AheadCopiesTest, HasTheNextUnitOnTheDeviceWhenItIsNeeded) {
  AheadCopies copies(units(3), kDevice, 300);
  EXPECT_THAT(copies.take(0), IsEmpty()) << "nothing was known before";
  copies.await_idle();
  EXPECT_EQ(copies.bytes_ahead(), 300u);
  const std::vector<at::Tensor> taken = copies.take(1);
  ASSERT_THAT(taken, SizeIs(2));
  for (const at::Tensor& tensor : taken) {
    EXPECT_EQ(tensor.device(), kDevice);
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
  }
  EXPECT_TRUE(at::equal(taken[0].cpu(), at::full({25}, 1.0)));
  EXPECT_TRUE(at::equal(taken[1].cpu(), at::full({50}, 1.0)));
}

TEST_F(AheadCopiesTest, LetsTheCurrentStreamWaitForTheCopies) {
  AheadCopies copies(units(2), kDevice, 300);
  copies.take(0);
  copies.await_idle();
  const std::int64_t waits = device_double::stream_waits();
  copies.take(1);
  EXPECT_EQ(device_double::stream_waits(), waits + 1);
}

TEST_F(AheadCopiesTest, CopiesWhileTheCallerComputes) {
  AheadCopies copies(units(3), kDevice, 600);
  device_double::hold_pool_copies(true);
  const std::int64_t before = device_double::pool_copies();
  copies.take(0);
  while (copies.bytes_ahead() == 0) {  // until the thread has begun
    std::this_thread::yield();
  }
  EXPECT_EQ(device_double::pool_copies(), before) << "and the call has returned";
  device_double::hold_pool_copies(false);
  EXPECT_THAT(copies.take(1), SizeIs(2));
}

TEST_F(AheadCopiesTest, NeverHasMoreOnTheDeviceThanTheWindowAndWhatWasTaken) {
  constexpr int kUnits = 8;
  AheadCopies copies(units(kUnits), kDevice, 600);
  for (int pass = 0; pass < 3; ++pass) {
    for (std::size_t unit = 0; unit < kUnits; ++unit) {
      const std::vector<at::Tensor> taken = copies.take(unit);
      copies.await_idle();
    }
  }
  EXPECT_EQ(peak(), 600 + 300);
}

TEST_F(AheadCopiesTest, ReleasesWhatWasNotNeeded) {
  AheadCopies copies(units(6), kDevice, 600);
  copies.take(0);
  copies.await_idle();
  EXPECT_EQ(in_use(), 600);
  device_double::hold_pool_copies(true);
  EXPECT_THAT(copies.take(4), IsEmpty());
  EXPECT_LE(in_use(), 300) << "of the unit that is expected now, if the thread has begun it";
}

TEST_F(AheadCopiesTest, DoesNotGiveOutCopiesOfWhatHasChangedSince) {
  const auto weights = units(2);
  AheadCopies copies(weights, kDevice, 600);
  copies.take(0);
  copies.await_idle();
  weights[1][0].tensor.add_(1);
  EXPECT_THAT(copies.take(1), IsEmpty());
}

TEST_F(AheadCopiesTest, LeavesAUnitThatHasNoRoomToTheCaller) {
  AheadCopies copies(units(3), kDevice, 600);
  device_double::set_room(before_ + 299);
  copies.take(0);
  copies.await_idle();
  EXPECT_THAT(copies.take(1), IsEmpty());
}

TEST_F(AheadCopiesTest, RefusesAUnitThatThereIsNot) {
  AheadCopies copies(units(3), kDevice, 600);
  EXPECT_THROW(copies.take(3), InvalidArgument);
}

TEST_F(AheadCopiesTest, LeavesNothingBehind) {
  {
    AheadCopies copies(units(3), kDevice, 600);
    copies.take(0);
    copies.await_idle();
  }
  await_background_threads();
  EXPECT_EQ(in_use(), 0);
}

}  // namespace
}  // namespace accelerate_cpp::offload
