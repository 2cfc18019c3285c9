#include "torch_bridge/device_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(DeviceKernels, AreForCudaDevices) {
  EXPECT_THAT([] { slot_kernels_on(c10::Device(c10::kCPU)); }, ThrowsMessage<InvalidArgument>(HasSubstr("found cpu")));
}

TEST(DeviceKernels, AreCompiledByTheCompilerThatIsNamed) {
  EXPECT_THAT([] { kernel_compiler("nowhere/libnvrtc.so"); },
              ThrowsMessage<SystemFailure>(HasSubstr("nowhere/libnvrtc.so")));
}

}  // namespace
}  // namespace accelerate_cpp::grad
