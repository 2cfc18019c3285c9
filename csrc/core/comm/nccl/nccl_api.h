// The entry points of NCCL that NcclCommunicator uses. They are declared here, so that a build needs neither nccl.h nor
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

enum class NcclDataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

// Further values name operations that were created by redop_create_premul_sum.
enum class NcclRedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

enum class NcclScalarResidence : int { kHostImmediate = 1 };  // the factor is read during the call

// The first error of the two, if there is one.
inline NcclResult worse(NcclResult first, NcclResult second) {
  const bool fine = first == NcclResult::kSuccess || first == NcclResult::kInProgress;
  return fine ? second : first;
}

struct NcclCommOpaque;
using NcclComm = NcclCommOpaque*;

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

inline constexpr int kNcclSplitNoColor = -1;

struct NcclApi {
  // 2.18.1 is the first version with ncclCommSplit; non-blocking initialisation (2.14) and the pre-multiplied sum
  // (2.11) are older.
  static constexpr int kMinimumVersion = 21801;

  // Opens `path`, or libnccl.so.2 where nvidia_library_names() finds it. Throws SystemFailure when it is absent or
  // older than kMinimumVersion.
  explicit NcclApi(const std::string& path = "", const std::string& beside = "");

  std::string path;  // the file that was opened
  int version = 0;   // 22703 is 2.27.3

  NcclResult (*get_version)(int* version);
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*comm_init_rank_config)(NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*comm_split)(NcclComm comm, int color, int key, NcclComm* child, NcclConfig* config);
  NcclResult (*comm_finalize)(NcclComm comm);
  NcclResult (*comm_destroy)(NcclComm comm);
  NcclResult (*comm_abort)(NcclComm comm);
  NcclResult (*comm_get_async_error)(NcclComm comm, NcclResult* state);
  NcclResult (*comm_count)(const NcclComm comm, int* size);
  NcclResult (*comm_user_rank)(const NcclComm comm, int* rank);
  const char* (*get_error_string)(NcclResult result);
  const char* (*get_last_error)(NcclComm comm);
  NcclResult (*redop_create_premul_sum)(NcclRedOp* op, void* factor, NcclDataType type, NcclScalarResidence residence,
                                        NcclComm comm);
  NcclResult (*redop_destroy)(NcclRedOp op, NcclComm comm);
  NcclResult (*all_reduce)(const void* input, void* output, std::size_t count, NcclDataType type, NcclRedOp op,
                           NcclComm comm, CudaStream stream);
  NcclResult (*reduce)(const void* input, void* output, std::size_t count, NcclDataType type, NcclRedOp op, int root,
                       NcclComm comm, CudaStream stream);
  NcclResult (*reduce_scatter)(const void* input, void* output, std::size_t output_count, NcclDataType type,
                               NcclRedOp op, NcclComm comm, CudaStream stream);
  NcclResult (*broadcast)(const void* input, void* output, std::size_t count, NcclDataType type, int root,
                          NcclComm comm, CudaStream stream);
  NcclResult (*all_gather)(const void* input, void* output, std::size_t input_count, NcclDataType type, NcclComm comm,
                           CudaStream stream);
  NcclResult (*send)(const void* data, std::size_t count, NcclDataType type, int peer, NcclComm comm,
                     CudaStream stream);
  NcclResult (*receive)(void* data, std::size_t count, NcclDataType type, int peer, NcclComm comm, CudaStream stream);
  NcclResult (*group_start)();
  NcclResult (*group_end)();

  // Throws unless `result` is success or in progress: PeerLost for an error of another rank, InvalidArgument for NCCL's
  // refusals, Timeout for its own, SystemFailure for the rest. `call` names the entry point.
  void check(NcclResult result, const char* call) const;

  // "2.27.3".
  static std::string version_text(int version);
};

}  // namespace accelerate_cpp::comm
