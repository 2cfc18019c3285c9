#include "core/comm/nccl/cuda_api.h"

#include <cerrno>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaApiTest : public OnDoubles {
 protected:
  CudaApi api_{ACCELERATE_CUDART_DOUBLE};
};

TEST_F(CudaApiTest, BindsEveryEntryPointToItsOwnFunction) {
  int count = 0;
  api_.check(api_.get_device_count(&count), "cudaGetDeviceCount");
  EXPECT_EQ(count, gpu_double().device_count);
  api_.check(api_.set_device(3), "cudaSetDevice");
  int device = -1;
  api_.check(api_.get_device(&device), "cudaGetDevice");
  EXPECT_EQ(device, 3);
  void* memory = nullptr;
  api_.check(api_.allocate(&memory, 8), "cudaMalloc");
  api_.check(api_.release(memory), "cudaFree");
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
  api_.check(api_.stream_create(&stream, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  api_.check(api_.event_create(&event, kCudaEventDisableTiming), "cudaEventCreateWithFlags");
  api_.check(api_.event_record(event, stream), "cudaEventRecord");
  api_.check(api_.stream_wait_event(stream, event, 0), "cudaStreamWaitEvent");
  EXPECT_TRUE(api_.done(api_.event_query(event), "cudaEventQuery"));
  api_.check(api_.device_synchronize(), "cudaDeviceSynchronize");
  api_.check(api_.event_destroy(event), "cudaEventDestroy");
  api_.check(api_.stream_destroy(stream), "cudaStreamDestroy");
  for (const char* const call :
       {"cudaGetDeviceCount", "cudaSetDevice", "cudaGetDevice", "cudaMalloc", "cudaFree", "cudaStreamCreateWithFlags",
        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery", "cudaDeviceSynchronize",
        "cudaEventDestroy", "cudaStreamDestroy"}) {
    EXPECT_EQ(gpu_double().count_calls(call), 1u) << call;
  }
}

TEST_F(CudaApiTest, SaysWhatFailedAndClearsTheErrorForOthers) {
  const std::string message = message_of<SystemFailure>([&] { api_.check(CudaStatus{719}, "cudaEventRecord"); });
  EXPECT_THAT(message, AllOf(HasSubstr("cudaEventRecord failed"), HasSubstr("an error of the double"),
                             HasSubstr("CUDA error 719")));
  EXPECT_EQ(gpu_double().count_calls("cudaGetLastError"), 1u);
}

TEST_F(CudaApiTest, TellsRunningOutOfMemoryFromOtherErrors) {
  const auto error_number = [&](CudaStatus status) {
    try {
      api_.check(status, "cudaMalloc");
    } catch (const SystemFailure& error) {
      return error.error_number();
    }
    return 0;
  };
  EXPECT_EQ(error_number(CudaStatus::kMemoryAllocation), ENOMEM);
  EXPECT_EQ(error_number(CudaStatus{700}), EIO);
  EXPECT_EQ(error_number(CudaStatus::kSuccess), 0);
}

TEST_F(CudaApiTest, TakesNotReadyForAnAnswer) {
  EXPECT_TRUE(api_.done(CudaStatus::kSuccess, "cudaEventQuery"));
  EXPECT_FALSE(api_.done(CudaStatus::kNotReady, "cudaEventQuery"));
  EXPECT_THROW(api_.done(CudaStatus{700}, "cudaEventQuery"), SystemFailure);
}

TEST_F(CudaApiTest, RefusesALibraryThatIsNotTheCudaRuntime) {
  EXPECT_THAT(message_of<SystemFailure>([] { const CudaApi api("libm.so.6"); }), HasSubstr("cudaGetDeviceCount"));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
