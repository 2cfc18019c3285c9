#include "core/comm/nccl/cuda_objects.h"

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaObjects : public OnDoubles {
 protected:
  int current() const { return gpu_double().current_device(); }
};

TEST_F(CudaObjects, RefuseADeviceThatIsNotThere) {
  gpu_double().device_count = 2;
  EXPECT_THAT(message_of<InvalidArgument>([] { device(2); }),
              AllOf(HasSubstr("cuda:2 does not exist"), HasSubstr("2 CUDA devices")));
  EXPECT_THROW(device(-1), InvalidArgument);
}

TEST_F(CudaObjects, ReportWhenCudaCannotCountDevices) {
  gpu_double().fail("cudaGetDeviceCount", 1, 100);
  EXPECT_THROW(device(0), SystemFailure);
}

TEST_F(CudaObjects, AGuardMakesItsDeviceCurrentAndRestoresTheOther) {
  const auto three = device(3);
  const auto five = device(5);
  EXPECT_EQ(current(), 0);
  {
    const DeviceGuard outer(*three);
    EXPECT_EQ(current(), 3);
    {
      const DeviceGuard inner(*five);
      EXPECT_EQ(current(), 5);
    }
    EXPECT_EQ(current(), 3);
  }
  EXPECT_EQ(current(), 0);
}

TEST_F(CudaObjects, AGuardOfTheCurrentDeviceSetsNothing) {
  const auto zero = device(0);
  {
    const DeviceGuard guard(*zero);
  }
  EXPECT_EQ(gpu_double().count_calls("cudaSetDevice"), 0u);
}

TEST_F(CudaObjects, AnEventHoldsBackAStreamOfItsDevice) {
  DeviceStream before(device(2));
  DeviceStream after(device(2));
  EXPECT_EQ(before.get()->device, 2);
  DeviceEvent event(device(2));
  const auto held = gpu_double().hold(before.get());
  event.record(before.get());
  event.hold_back(after.get());
  EXPECT_FALSE(gpu_double().idle(after.get()));
  gpu_double().release(held);
  EXPECT_TRUE(gpu_double().idle(after.get()));
}

TEST_F(CudaObjects, AnEventPassesWhenWhatWasBeforeItHasEnded) {
  DeviceStream stream(device());
  DeviceEvent event(device());
  EXPECT_TRUE(event.passed()) << "never recorded";
  const auto held = gpu_double().hold(stream.get());
  event.record(stream.get());
  EXPECT_FALSE(event.passed());
  gpu_double().release(held);
  EXPECT_TRUE(event.passed());
}

TEST_F(CudaObjects, FailuresOfStreamsAndEventsAreReported) {
  for (const char* const call : {"cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"}) {
    gpu_double().fail(call, 1, 700);
    EXPECT_THAT(message_of<SystemFailure>([] {
                  const DeviceStream stream(device());
                  const DeviceEvent event(device());
                }),
                HasSubstr(call));
  }
  DeviceStream stream(device());
  DeviceEvent event(device());
  gpu_double().fail("cudaEventRecord", 1, 700);
  EXPECT_THROW(event.record(stream.get()), SystemFailure);
  gpu_double().fail("cudaEventQuery", 1, 700);
  EXPECT_THROW(event.passed(), SystemFailure);
}

TEST_F(CudaObjects, DoNothingInAForkedChild) {
  const auto parents = device();
  auto* const stream = new DeviceStream(parents);
  auto* const event = new DeviceEvent(parents);
  const pid_t child = start_process({}, 0, [&](Store&, int) {
    const std::size_t before = gpu_double().calls.size();
    const DeviceGuard guard(*parents);
    EXPECT_TRUE(parents->in_forked_child());
    delete stream;
    delete event;
    EXPECT_EQ(gpu_double().calls.size(), before);
  });
  EXPECT_EQ(wait_process(child), 0);
  EXPECT_FALSE(parents->in_forked_child());
  delete stream;
  delete event;
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
