// Compiled where nccl.h is: our declarations against theirs. A difference does not compile.
#include <gtest/gtest.h>
#include <nccl.h>

#include "core/comm/nccl/nccl_api.h"
#include "core/comm/nccl/same_declaration.h"

namespace accelerate_cpp::comm::testing {
namespace {

#define ACCELERATE_SAME(ours, theirs)                                           \
  static_assert(kSameDeclaration<decltype(NcclApi::ours), decltype(&::theirs)>, \
                "NcclApi::" #ours " is declared unlike " #theirs)

ACCELERATE_SAME(get_version, ncclGetVersion);
ACCELERATE_SAME(get_unique_id, ncclGetUniqueId);
ACCELERATE_SAME(comm_init_rank_config, ncclCommInitRankConfig);
ACCELERATE_SAME(comm_finalize, ncclCommFinalize);
ACCELERATE_SAME(comm_destroy, ncclCommDestroy);
ACCELERATE_SAME(comm_abort, ncclCommAbort);
ACCELERATE_SAME(comm_get_async_error, ncclCommGetAsyncError);
ACCELERATE_SAME(get_error_string, ncclGetErrorString);
ACCELERATE_SAME(get_last_error, ncclGetLastError);
ACCELERATE_SAME(all_reduce, ncclAllReduce);
ACCELERATE_SAME(reduce_scatter, ncclReduceScatter);
ACCELERATE_SAME(broadcast, ncclBroadcast);
ACCELERATE_SAME(all_gather, ncclAllGather);
ACCELERATE_SAME(send, ncclSend);
ACCELERATE_SAME(receive, ncclRecv);
ACCELERATE_SAME(group_start, ncclGroupStart);
ACCELERATE_SAME(group_end, ncclGroupEnd);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
ACCELERATE_SAME(mem_alloc, ncclMemAlloc);
ACCELERATE_SAME(mem_free, ncclMemFree);
ACCELERATE_SAME(comm_register, ncclCommRegister);
ACCELERATE_SAME(comm_deregister, ncclCommDeregister);
#endif

#define ACCELERATE_EQUAL(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))

ACCELERATE_EQUAL(NcclResult::kSuccess, ncclSuccess);
ACCELERATE_EQUAL(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError);
ACCELERATE_EQUAL(NcclResult::kSystemError, ncclSystemError);
ACCELERATE_EQUAL(NcclResult::kInternalError, ncclInternalError);
ACCELERATE_EQUAL(NcclResult::kInvalidArgument, ncclInvalidArgument);
ACCELERATE_EQUAL(NcclResult::kInvalidUsage, ncclInvalidUsage);
ACCELERATE_EQUAL(NcclResult::kRemoteError, ncclRemoteError);
ACCELERATE_EQUAL(NcclResult::kInProgress, ncclInProgress);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 0)
ACCELERATE_EQUAL(NcclResult::kTimeout, ncclTimeout);
#endif
ACCELERATE_EQUAL(NcclDataType::kUint8, ncclUint8);
ACCELERATE_EQUAL(NcclDataType::kFloat16, ncclFloat16);
ACCELERATE_EQUAL(NcclDataType::kFloat32, ncclFloat32);
ACCELERATE_EQUAL(NcclDataType::kFloat64, ncclFloat64);
ACCELERATE_EQUAL(NcclDataType::kBfloat16, ncclBfloat16);
ACCELERATE_EQUAL(NcclRedOp::kSum, ncclSum);
ACCELERATE_EQUAL(NcclRedOp::kAvg, ncclAvg);
ACCELERATE_EQUAL(NcclConfig::kUnset, NCCL_CONFIG_UNDEF_INT);
static_assert(sizeof(NcclUniqueId) == NCCL_UNIQUE_ID_BYTES);

// Ours is the beginning of theirs.
#define ACCELERATE_SAME_MEMBER(ours, theirs)                                    \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs) && \
                sizeof(NcclConfig::ours) == sizeof(ncclConfig_t::theirs))

ACCELERATE_SAME_MEMBER(size, size);
ACCELERATE_SAME_MEMBER(magic, magic);
ACCELERATE_SAME_MEMBER(version, version);
ACCELERATE_SAME_MEMBER(blocking, blocking);
ACCELERATE_SAME_MEMBER(cga_cluster_size, cgaClusterSize);
ACCELERATE_SAME_MEMBER(min_ctas, minCTAs);
ACCELERATE_SAME_MEMBER(max_ctas, maxCTAs);
ACCELERATE_SAME_MEMBER(net_name, netName);
ACCELERATE_SAME_MEMBER(split_share, splitShare);
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0)
ACCELERATE_SAME_MEMBER(traffic_class, trafficClass);
#endif

TEST(NcclDeclarations, WereComparedWithAVersionThatIsUsed) {
  EXPECT_GE(NCCL_VERSION_CODE, NcclApi::kMinimumVersion);
}

TEST(NcclDeclarations, BeginAConfigurationAsNcclDoesButForBlocking) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_EQ(ours.min_ctas, theirs.minCTAs);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
  EXPECT_EQ(ours.blocking, 0);
  EXPECT_EQ(NcclApi::version_text(NCCL_VERSION_CODE),
            std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." + std::to_string(NCCL_PATCH));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
