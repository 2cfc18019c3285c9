#include "core/cuda/driver_api.h"

#include "core/base/error.h"
#include "core/cuda/on_cuda_double.h"

namespace accelerate_cpp::cuda::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using DriverApiTest = OnCudaDouble;

TEST_F(DriverApiTest, OpensTheDriverAndStartsIt) {
  const DriverApi driver(ACCELERATE_CUDA_DOUBLE);
  EXPECT_THAT(driver.path, HasSubstr("cuda_double"));
  int device = -1;
  driver.check(driver.device_get(&device, 3), "cuDeviceGet");
  EXPECT_EQ(device, 3);
}

TEST_F(DriverApiTest, SaysWhatFailed) {
  cuda_double().failures["cuInit"] = 100;
  EXPECT_THAT(message_of<SystemFailure>([] { const DriverApi driver(ACCELERATE_CUDA_DOUBLE); }),
              AllOf(HasSubstr("cuInit failed"), HasSubstr("an error of the double"), HasSubstr("error 100")));
}

TEST_F(DriverApiTest, RefusesALibraryThatIsNotTheDriver) {
  EXPECT_THAT(message_of<SystemFailure>([] { const DriverApi driver("libm.so.6"); }), HasSubstr("cuInit"));
}

}  // namespace
}  // namespace accelerate_cpp::cuda::testing
