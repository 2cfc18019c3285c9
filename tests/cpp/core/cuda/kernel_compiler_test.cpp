// On the double; tests/python/bindings/test_cuda.py compiles with the real one where it is installed.
#include "core/cuda/kernel_compiler.h"

#include "core/base/error.h"
#include "core/cuda/on_cuda_double.h"

namespace accelerate_cpp::cuda::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class KernelCompilerTest : public OnCudaDouble {
 protected:
  KernelCompiler compiler_{ACCELERATE_CUDA_DOUBLE};
};

TEST_F(KernelCompilerTest, KnowsWhatItCanCompileFor) {
  EXPECT_THAT(compiler_.path(), HasSubstr("cuda_double"));
  EXPECT_THAT(compiler_.capabilities(), ElementsAre(75, 80, 90));
}

TEST_F(KernelCompilerTest, MakesMachineCodeForADeviceThatItKnows) {
  const KernelImage image = compiler_.slot_kernels(80);
  EXPECT_EQ(image.architecture, "sm_80");
  EXPECT_EQ(image.bytes, "image for sm_80");
}

TEST_F(KernelCompilerTest, LeavesTheRestToTheDriverForADeviceThatIsNewer) {
  EXPECT_EQ(compiler_.slot_kernels(86).architecture, "compute_80");
  EXPECT_EQ(compiler_.slot_kernels(121).bytes, "image for compute_90");
}

TEST_F(KernelCompilerTest, RefusesADeviceThatIsOlderThanAllItKnows) {
  EXPECT_THAT(message_of<SystemFailure>([&] { compiler_.slot_kernels(70); }),
              AllOf(HasSubstr("75 and newer"), HasSubstr("not for 70")));
}

TEST_F(KernelCompilerTest, RepeatsWhatTheCompilerSays) {
  cuda_double().failures["nvrtcCompileProgram"] = 6;
  EXPECT_THAT(message_of<SystemFailure>([&] { compiler_.slot_kernels(90); }),
              AllOf(HasSubstr("refused the kernels for sm_90"), HasSubstr("line 7: no")));
}

TEST_F(KernelCompilerTest, SaysWhichCallFailed) {
  cuda_double().failures["nvrtcCreateProgram"] = 1;
  EXPECT_THAT(message_of<SystemFailure>([&] { compiler_.slot_kernels(90); }),
              AllOf(HasSubstr("nvrtcCreateProgram failed"), HasSubstr("an error of the double")));
}

TEST_F(KernelCompilerTest, IsNotFoundWhereThereIsNone) {
  EXPECT_THAT(message_of<SystemFailure>([] { const KernelCompiler none("nowhere/libnvrtc.so"); }),
              HasSubstr("was not found"));
}

}  // namespace
}  // namespace accelerate_cpp::cuda::testing
