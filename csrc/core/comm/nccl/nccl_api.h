// The entry points of NCCL that NcclComm uses. They are declared here, so that a build needs neither nccl.h nor
// CUDA; where nccl.h is present (pip's nvidia-nccl-cu13 has it), nccl_declarations_test.cpp compares.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "core/comm/nccl/cuda_api.h"

namespace accelerate_cpp::comm {

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,
};

enum class NcclDataType : int { kUint8 = 1, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9 };
enum class NcclRedOp : int { kSum = 0, kAvg = 4 };

struct NcclCommOpaque;
using NcclHandle = NcclCommOpaque*;

struct NcclUniqueId {
  char bytes[128];
};

// The settings of a communicator as NCCL 2.18 knew them. Later versions append members; they see from `size` and
// `version` which ones they were given. Unset members mean NCCL's own choice.
struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21801;
  int blocking = 0;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;  // padding in 2.18
};

struct NcclApi {
  // Older versions have non-blocking communicators, too (from 2.14), but other settings than NcclConfig.
  static constexpr int kMinimumVersion = 21801;

  // Opens `path`, or libnccl.so.2 where nvidia_library_names() finds it. Throws SystemFailure when it is absent or
  // older than kMinimumVersion.
  explicit NcclApi(const std::string& path = "", const std::string& beside = "");

  std::string path;  // the file that was opened
  int version = 0;   // 22703 is 2.27.3

  NcclResult (*get_version)(int* version);
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*comm_init_rank_config)(NcclHandle* comm, int size, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*comm_finalize)(NcclHandle comm);
  NcclResult (*comm_destroy)(NcclHandle comm);
  NcclResult (*comm_abort)(NcclHandle comm);
  NcclResult (*comm_get_async_error)(NcclHandle comm, NcclResult* state);
  const char* (*get_error_string)(NcclResult result);
  const char* (*get_last_error)(NcclHandle comm);
  NcclResult (*all_reduce)(const void* input, void* output, std::size_t count, NcclDataType type, NcclRedOp op,
                           NcclHandle comm, CudaStream stream);
  NcclResult (*reduce_scatter)(const void* input, void* output, std::size_t output_count, NcclDataType type,
                               NcclRedOp op, NcclHandle comm, CudaStream stream);
  NcclResult (*broadcast)(const void* input, void* output, std::size_t count, NcclDataType type, int root,
                          NcclHandle comm, CudaStream stream);
  NcclResult (*all_gather)(const void* input, void* output, std::size_t input_count, NcclDataType type, NcclHandle comm,
                           CudaStream stream);
  NcclResult (*send)(const void* data, std::size_t count, NcclDataType type, int peer, NcclHandle comm,
                     CudaStream stream);
  NcclResult (*receive)(void* data, std::size_t count, NcclDataType type, int peer, NcclHandle comm, CudaStream stream);
  NcclResult (*group_start)();
  NcclResult (*group_end)();

  // From 2.19 on; null where the library does not have them.
  NcclResult (*mem_alloc)(void** memory, std::size_t size_bytes) = nullptr;
  NcclResult (*mem_free)(void* memory) = nullptr;
  NcclResult (*comm_register)(const NcclHandle comm, void* memory, std::size_t size_bytes,
                              void** registration) = nullptr;
  NcclResult (*comm_deregister)(const NcclHandle comm, void* registration) = nullptr;
  bool registers() const {
    return mem_alloc != nullptr && mem_free != nullptr && comm_register != nullptr && comm_deregister != nullptr;
  }

  // Throws unless `result` is success or in progress: PeerLost for an error of another rank, InvalidArgument for NCCL's
  // refusals, Timeout for its own, SystemFailure for the rest. `call` names the entry point.
  void check(NcclResult result, const char* call) const;

  // "2.27.3".
  static std::string version_text(int version);
};

}  // namespace accelerate_cpp::comm
