// What ranks ask a group for, and what all of them must ask for alike in a collective.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/dtype.h"
#include "core/comm/call.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

enum class CallKind : std::uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSplit,
  kWindow,      // of `count` bytes
  kMeeting,     // on the topic whose fingerprint is `count`
  kGradients,   // a round of a gradient exchange
  kWithdrawal,  // takes the place of whatever the other ranks call
  kSend,        // to one rank, which receives: no collective
  kReceive,
};

// "all_reduce", …, for messages and counts.
const char* name(CallKind kind);

// Trivially copyable, so that it can lie in shared memory.
struct CallSignature {
  CallKind kind;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  std::int32_t root = -1;
  std::uint64_t count = 0;  // elements of this rank's operand; for kGradients the number of buckets
  std::uint64_t round = 0;  // for kGradients: which gradient exchange (upper half) and which of its rounds
  Shape shape;

  // When operands may differ in size (`sized`), their counts are compared by pairs of ranks, not here.
  bool agrees_with(const CallSignature& other, bool sized) const;

  // "all_reduce(sum) of [10, 100] float32", for messages, which call ranks as `names` does.
  std::string describe(const WaitHooks& names = {}) const;
};

}  // namespace accelerate_cpp::comm
