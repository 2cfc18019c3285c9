#include "core/placement/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace accelerate_cpp::placement {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

DeviceRequest on_gpus(int count, int local_rank) {
  DeviceRequest request;
  request.accelerators = {{"cuda", count}};
  request.local_rank = local_rank;
  return request;
}

DeviceRequest forced(const std::string& device) {
  DeviceRequest request = on_gpus(2, 0);
  request.forced = device;
  return request;
}

TEST(DeviceChoice, IsTheCpuWhenThereIsNoAccelerator) {
  EXPECT_EQ(choose_device({}), "cpu");
  DeviceRequest later;
  later.local_rank = 7;
  EXPECT_EQ(choose_device(later), "cpu");
}

TEST(DeviceChoice, GivesEachLocalRankItsOwnDevice) {
  EXPECT_EQ(choose_device(on_gpus(3, 0)), "cuda:0");
  EXPECT_EQ(choose_device(on_gpus(3, 2)), "cuda:2");
}

TEST(DeviceChoice, TakesTheFirstAcceleratorThatIsThere) {
  DeviceRequest request = on_gpus(1, 0);
  request.accelerators.insert(request.accelerators.begin(), {"xpu", 4});
  EXPECT_EQ(choose_device(request), "xpu:0");
}

TEST(DeviceChoice, NamesNoIndexWhereTheRankDoesNotDecide) {
  DeviceRequest request;
  request.accelerators = {{"mps", 1, false}};
  EXPECT_EQ(choose_device(request), "mps");
  request.accelerators = {{"hpu", 2, false}};
  request.local_rank = 5;
  EXPECT_EQ(choose_device(request), "hpu");
}

TEST(DeviceChoice, IsTheCpuWhenTheUserAskedForIt) {
  DeviceRequest request = on_gpus(8, 3);
  request.force_cpu = true;
  EXPECT_EQ(choose_device(request), "cpu");
}

TEST(DeviceChoice, TakesTheUsersOwnDeviceBeforeAnythingElse) {
  DeviceRequest request = forced("cuda:1");
  request.force_cpu = true;
  EXPECT_EQ(choose_device(request), "cuda:1");
  EXPECT_EQ(choose_device(forced("cuda")), "cuda");
  EXPECT_EQ(choose_device(forced("cpu")), "cpu");
  EXPECT_EQ(choose_device(forced("meta")), "meta");
}

TEST(DeviceChoice, FindsTheUsersDeviceAmongAllAccelerators) {
  DeviceRequest request = forced("xpu:3");
  request.accelerators.push_back({"xpu", 4});
  EXPECT_EQ(choose_device(request), "xpu:3");
}

TEST(DeviceChoice, LetsSeveralRanksShareTheUsersOwnDevice) {
  DeviceRequest request = forced("cuda:0");
  request.local_rank = 5;
  EXPECT_EQ(choose_device(request), "cuda:0");
}

TEST(DeviceChoice, RefusesMoreLocalRanksThanDevicesAndSaysHowManyThereAre) {
  EXPECT_THAT([] { choose_device(on_gpus(2, 2)); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("local rank 2"), HasSubstr("2 of type cuda"))));
  EXPECT_THROW(choose_device(on_gpus(2, -1)), InvalidArgument);
}

TEST(DeviceChoice, RefusesADeviceThatIsNotPresentAndListsThoseThatAre) {
  EXPECT_THAT([] { choose_device(forced("cuda:2")); },
              ThrowsMessage<InvalidArgument>(AllOf(HasSubstr("'cuda:2'"), HasSubstr("cpu, 2 x cuda"))));
  EXPECT_THROW(choose_device(forced("xpu")), InvalidArgument);
  EXPECT_THROW(choose_device(forced("mps")), InvalidArgument);
}

TEST(DeviceChoice, RefusesWhatIsNoDeviceName) {
  for (const char* name : {"cuda:", "cuda:x", "cuda:-1", "cuda: 1", "cuda:1x", "cuda:0:1", ":0", ":", "cpu:one",
                           "cuda:99999999999999999999"}) {
    EXPECT_THAT([name] { choose_device(forced(name)); },
                ThrowsMessage<InvalidArgument>(AllOf(HasSubstr(name), HasSubstr("is not a device"))))
        << name;
  }
}

}  // namespace
}  // namespace accelerate_cpp::placement
