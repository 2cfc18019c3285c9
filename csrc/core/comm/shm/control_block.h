// What each rank shares about itself. It lies at the start of the rank's segment 0; only the owner writes to it, but
// for `event.sleepers`.
//
//   0    event      8   counter that peers sleep on, and how many do
//   8    state      4   RankState
//   12   pid        4
//   16   announced  8   sequence number of the last operation that operations[] describes; the first is 1
//   24   staged     8   pieces this rank has put into its staging slots, over all operations
//   32   consumed   8   pieces whose staged bytes this rank no longer reads
//   40   failed_in  8   sequence number of the operation in which, or before which, it failed; written before the state
//   64   operations     descriptions of the operations with even and odd sequence numbers
//   ...  failure        why the state is kFailed; written before the state
//
// A description may be overwritten two operations later: by then every peer has announced the operation in between,
// which it does only after it has read the older one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/dtype.h"
#include "core/comm/options.h"
#include "core/comm/shm/event_word.h"

namespace accelerate_cpp::comm {

enum class RankState : std::uint32_t { kRunning, kFailed, kLeft };

enum class OperationKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kBarrier,
  kGradients,
};

// What a rank is about to do. All ranks must agree on everything above `in_arena`.
struct Operation {
  OperationKind kind;
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::int32_t root = -1;
  std::uint64_t count = 0;  // elements per rank; for kGradients the number of buckets
  std::uint64_t round = 0;  // for kGradients: which exchange (upper half) and which of its rounds

  bool in_arena = false;  // the operand is at (segment, offset_bytes) of this rank's arena
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;

  bool agrees_with(const Operation& other) const {
    return kind == other.kind && dtype == other.dtype && reduce_op == other.reduce_op && root == other.root &&
           count == other.count && round == other.round;
  }
};

const char* name(OperationKind kind);

// "all_reduce(sum) of 1000 float32", for messages.
std::string describe(const Operation& operation);

inline constexpr std::size_t kFailureBytes = 1024;

struct RankControl {
  EventWord event;
  std::atomic<RankState> state;
  std::int32_t pid;
  std::atomic<std::uint64_t> announced;
  std::atomic<std::uint64_t> staged;
  std::atomic<std::uint64_t> consumed;
  std::uint64_t failed_in;
  alignas(64) Operation operations[2];
  char failure[kFailureBytes];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counters are shared between processes");
static_assert(offsetof(RankControl, announced) == 16 && offsetof(RankControl, consumed) == 32, "see the layout above");

}  // namespace accelerate_cpp::comm
