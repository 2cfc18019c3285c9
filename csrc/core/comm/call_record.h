// What a rank asks of an operation, in a form that other ranks can compare with what they ask.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
  kMeeting,  // on the topic whose fingerprint is `count`
};

struct CallRecord {
  CallKind kind;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  std::int32_t root = -1;
  // Elements of this rank's operand. All ranks have the same in operations without `gives`.
  std::uint64_t count = 0;
  // Elements that this rank gives to and expects from each rank, where sizes may differ; else empty.
  std::vector<std::uint64_t> gives;
  std::vector<std::uint64_t> expects;
  Shape shape;           // compared in operations without `gives`
  std::string location;  // "train.py:88"; not compared

  // "all_reduce(sum) of [10, 100] float32".
  std::string describe() const;

  std::string encode() const;
  // Empty unless `text` was made by encode().
  static std::optional<CallRecord> decode(const std::string& text);
};

// 16 bytes by which ranks find out whether their records fit together, without exchanging them.
struct CallDigest {
  std::uint64_t common = 0;   // what all ranks must have equal
  std::uint64_t balance = 0;  // of what is given (added) and expected (subtracted); all ranks' together are zero

  CallDigest() = default;
  CallDigest(const CallRecord& record, int rank);
};

bool fit_together(const std::vector<CallDigest>& digests);

// The records of the ranks as far as they are known, by rank. The first contradiction among them as one sentence.
using KnownCalls = std::vector<std::optional<CallRecord>>;
std::optional<std::string> find_contradiction(const KnownCalls& calls);

// One line per rank: what it asks, and from where.
std::string table_of(const KnownCalls& calls);

}  // namespace accelerate_cpp::comm
