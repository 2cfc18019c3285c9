#include "core/comm/nccl/cuda_objects.h"

#include <cstring>

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

TEST_F(CudaObjects, AStreamIsOfItsDeviceAndCopiesInOrder) {
  DeviceStream stream(device(2));
  EXPECT_EQ(stream.get()->device, 2);
  const auto held = gpu_double().hold(stream.get());
  int first = 1;
  int second = 2;
  int target = 0;
  stream.copy(&target, &first, sizeof(int));
  stream.copy(&target, &second, sizeof(int));
  EXPECT_FALSE(stream.idle());
  EXPECT_EQ(target, 0);
  gpu_double().release(held);
  EXPECT_TRUE(stream.idle());
  EXPECT_EQ(target, 2);
}

TEST_F(CudaObjects, AStreamDoesNotBotherCudaWithCopiesOfNothing) {
  DeviceStream stream(device());
  int value = 1;
  stream.copy(nullptr, nullptr, 0);
  stream.copy(&value, &value, sizeof(value));
  EXPECT_EQ(gpu_double().count_calls("cudaMemcpyAsync"), 0u);
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

TEST_F(CudaObjects, AnEventHoldsBackAnotherStream) {
  DeviceStream before(device());
  DeviceStream after(device());
  DeviceEvent event(device());
  const auto held = gpu_double().hold(before.get());
  event.record(before.get());
  event.hold_back(after.get());
  EXPECT_FALSE(after.idle());
  gpu_double().release(held);
  EXPECT_TRUE(after.idle());
}

TEST_F(CudaObjects, MemoryLiesOnItsDeviceOrIsPinned) {
  const CudaMemory on_device(device(4), MemoryKind::kDevice, 100);
  const CudaMemory pinned(device(4), MemoryKind::kPinned, 100);
  EXPECT_TRUE(gpu_double().owns(on_device.data(), 100, 4));
  EXPECT_TRUE(gpu_double().owns(pinned.data(), 100, -1));
  EXPECT_EQ(on_device.size_bytes(), 100u);
}

TEST_F(CudaObjects, MemoryOfNothingStillHasAnAddress) {
  const CudaMemory nothing(device(), MemoryKind::kDevice, 0);
  EXPECT_NE(nothing.data(), nullptr);
}

TEST_F(CudaObjects, MemoryThatIsNotThereIsNamedWithItsSizeAndDevice) {
  gpu_double().fail("cudaMalloc", 1, static_cast<int>(CudaStatus::kMemoryAllocation));
  EXPECT_THAT(message_of<SystemFailure>([] { const CudaMemory memory(device(1), MemoryKind::kDevice, 12345); }),
              AllOf(HasSubstr("12345 bytes on cuda:1"), HasSubstr("out of memory")));
  gpu_double().fail("cudaMallocHost", 1, static_cast<int>(CudaStatus::kMemoryAllocation));
  EXPECT_THROW(CudaMemory(device(1), MemoryKind::kPinned, 1), SystemFailure);
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
  gpu_double().fail("cudaStreamQuery", 1, 700);
  EXPECT_THROW(stream.idle(), SystemFailure);
}

TEST_F(CudaObjects, GrowingMemoryKeepsItsPlaceWhileItFitsAndReleasesNothingBeforeTheEnd) {
  {
    GrowingMemory memory(device(), MemoryKind::kDevice);
    std::byte* const small = memory.at_least(10);
    EXPECT_EQ(memory.at_least(4096), small);
    std::byte* const large = memory.at_least(4097);
    EXPECT_NE(large, small);
    EXPECT_EQ(memory.at_least(8192), large) << "it doubles";
    EXPECT_TRUE(gpu_double().owns(memory.at_least(100000), 100000, 0));
    EXPECT_EQ(gpu_double().count_calls("cudaFree"), 0u);
  }
  EXPECT_EQ(gpu_double().count_calls("cudaFree"), 3u);
}

TEST_F(CudaObjects, DoNothingInAForkedChild) {
  const auto parents = device();
  auto* const memory = new CudaMemory(parents, MemoryKind::kDevice, 8);
  auto* const stream = new DeviceStream(parents);
  auto* const event = new DeviceEvent(parents);
  const pid_t child = start_process({}, 0, [&](Store&, int) {
    const std::size_t before = gpu_double().calls.size();
    const DeviceGuard guard(*parents);
    EXPECT_TRUE(parents->in_forked_child());
    delete memory;
    delete stream;
    delete event;
    EXPECT_EQ(gpu_double().calls.size(), before);
  });
  EXPECT_EQ(wait_process(child), 0);
  EXPECT_FALSE(parents->in_forked_child());
  delete memory;
  delete stream;
  delete event;
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
