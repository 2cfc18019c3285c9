#include "core/comm/nccl/nccl_api.h"

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NcclApiTest : public OnDoubles {};

TEST_F(NcclApiTest, KnowsVersionAndFileOfTheLibrary) {
  const NcclApi api(ACCELERATE_NCCL_DOUBLE);
  EXPECT_EQ(api.version, 22703);
  EXPECT_THAT(api.path, HasSubstr("nccl_double"));
}

TEST_F(NcclApiTest, RefusesALibraryThatIsTooOldAndSaysWhy) {
  nccl_double().version = 21800;
  EXPECT_THAT(message_of<SystemFailure>([] { const NcclApi api(ACCELERATE_NCCL_DOUBLE); }),
              AllOf(HasSubstr("NCCL 2.18.0 at "), HasSubstr("2.18.1 is the oldest version")));
  nccl_double().version = 21801;
  EXPECT_EQ(NcclApi(ACCELERATE_NCCL_DOUBLE).version, 21801);
}

TEST_F(NcclApiTest, RefusesALibraryThatIsNotNccl) {
  EXPECT_THAT(message_of<SystemFailure>([] { const NcclApi api("libm.so.6"); }), HasSubstr("ncclGetVersion"));
}

TEST_F(NcclApiTest, NamesThePlacesItLookedAtWhenThereIsNone) {
  EXPECT_THAT(message_of<SystemFailure>([] { const NcclApi api("nowhere/libnccl.so.2"); }),
              AllOf(HasSubstr("NCCL (libnccl.so.2"), HasSubstr("nowhere/libnccl.so.2")));
}

TEST_F(NcclApiTest, TurnsResultsIntoTheErrorsThatACallerCanActOn) {
  const NcclApi api(ACCELERATE_NCCL_DOUBLE);
  EXPECT_NO_THROW(api.check(NcclResult::kSuccess, "ncclSend"));
  EXPECT_NO_THROW(api.check(NcclResult::kInProgress, "ncclSend"));
  EXPECT_THROW(api.check(NcclResult::kRemoteError, "ncclSend"), PeerLost);
  EXPECT_THROW(api.check(NcclResult::kInvalidUsage, "ncclSend"), InvalidArgument);
  EXPECT_THROW(api.check(NcclResult::kInvalidArgument, "ncclSend"), InvalidArgument);
  EXPECT_THROW(api.check(NcclResult::kTimeout, "ncclSend"), Timeout);
  EXPECT_THROW(api.check(NcclResult::kUnhandledCudaError, "ncclSend"), SystemFailure);
  EXPECT_THROW(api.check(NcclResult::kInternalError, "ncclSend"), SystemFailure);
}

TEST_F(NcclApiTest, PassesOnWhatNcclSaysAboutAnError) {
  const NcclApi api(ACCELERATE_NCCL_DOUBLE);
  nccl_double().last_error = "the cable is out";
  EXPECT_THAT(message_of<SystemFailure>([&] { api.check(NcclResult::kSystemError, "ncclSend"); }),
              AllOf(HasSubstr("ncclSend failed with \"unhandled system error\" (NCCL error 2, NCCL 2.27.3)"),
                    HasSubstr("the cable is out"), HasSubstr("NCCL_DEBUG")));
}

TEST_F(NcclApiTest, KnowsWhetherTheLibraryRegistersMemory) {
  NcclApi api(ACCELERATE_NCCL_DOUBLE);
  EXPECT_TRUE(api.registers());
  api.mem_free = nullptr;
  EXPECT_FALSE(api.registers());
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
