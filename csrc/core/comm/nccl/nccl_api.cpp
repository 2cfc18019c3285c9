#include "core/comm/nccl/nccl_api.h"

#include <cerrno>

#include "core/base/error.h"
#include "core/cuda/library.h"

namespace accelerate_cpp::comm {

NcclApi::NcclApi(const std::string& path_, const std::string& beside) {
  const cuda::Library library("NCCL (libnccl.so.2; pip's nvidia-nccl-cu13 and torch's CUDA wheels have it)",
                              cuda::nvidia_library_names(path_, beside, {"libnccl.so.2"}, {"nvidia/nccl/lib"}));
  path = library.path();
  library.bind(get_version, "ncclGetVersion");
  library.bind(get_error_string, "ncclGetErrorString");
  library.bind(get_last_error, "ncclGetLastError");
  check(get_version(&version), "ncclGetVersion");
  if (version < kMinimumVersion) {
    throw SystemFailure("NCCL " + version_text(version) + " at " + path +
                            " is too old: " + version_text(kMinimumVersion) +
                            " is the oldest version whose settings are known here. Install a newer one",
                        ENOSYS);
  }
  library.bind(get_unique_id, "ncclGetUniqueId");
  library.bind(comm_init_rank_config, "ncclCommInitRankConfig");
  library.bind(comm_finalize, "ncclCommFinalize");
  library.bind(comm_destroy, "ncclCommDestroy");
  library.bind(comm_abort, "ncclCommAbort");
  library.bind(comm_get_async_error, "ncclCommGetAsyncError");
  library.bind(all_reduce, "ncclAllReduce");
  library.bind(reduce_scatter, "ncclReduceScatter");
  library.bind(broadcast, "ncclBroadcast");
  library.bind(all_gather, "ncclAllGather");
  library.bind(send, "ncclSend");
  library.bind(receive, "ncclRecv");
  library.bind(group_start, "ncclGroupStart");
  library.bind(group_end, "ncclGroupEnd");
  library.bind_if_there(mem_alloc, "ncclMemAlloc");
  library.bind_if_there(mem_free, "ncclMemFree");
  library.bind_if_there(comm_register, "ncclCommRegister");
  library.bind_if_there(comm_deregister, "ncclCommDeregister");
}

void NcclApi::check(NcclResult result, const char* call) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) {
    return;
  }
  std::string text = std::string(call) + " failed with \"" + get_error_string(result) + "\" (NCCL error " +
                     std::to_string(static_cast<int>(result)) + ", NCCL " + version_text(version) + ")";
  const char* const detail = get_last_error(nullptr);
  if (detail != nullptr && *detail != '\0') {
    text += ": " + std::string(detail);
  }
  switch (result) {
    case NcclResult::kRemoteError:
      throw PeerLost(text);
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      throw InvalidArgument(text);
    case NcclResult::kTimeout:
      throw Timeout(text);
    default:
      throw SystemFailure(text + ". NCCL_DEBUG=WARN in the environment makes NCCL say more", EIO);
  }
}

std::string NcclApi::version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace accelerate_cpp::comm
