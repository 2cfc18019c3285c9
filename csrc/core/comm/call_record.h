// What a rank asks of an operation, in a form that other ranks can compare with what they ask.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/call_signature.h"

namespace accelerate_cpp::comm {

struct CallRecord : CallSignature {
  CallRecord(CallKind kind_, DType dtype_ = DType::kUInt8,  // NOLINT(google-explicit-constructor)
             ReduceOp op_ = ReduceOp::kSum, std::int32_t root_ = -1, std::uint64_t count_ = 0,
             std::vector<std::uint64_t> gives_ = {}, std::vector<std::uint64_t> expects_ = {})
      : CallSignature{kind_, dtype_, op_, root_, count_}, gives(std::move(gives_)), expects(std::move(expects_)) {}

  // Elements that this rank gives to and expects from each rank, where sizes may differ; else empty.
  std::vector<std::uint64_t> gives;
  std::vector<std::uint64_t> expects;
  std::string location;  // the text of a CallSite; not compared

  std::string encode() const;
  // Empty unless `text` was made by encode().
  static std::optional<CallRecord> decode(const std::string& text);
};

// 16 bytes by which ranks find out whether their records fit together, without sending them to each other.
struct CallDigest {
  std::uint64_t common = 0;   // what all ranks must have equal
  std::uint64_t balance = 0;  // of what is given (added) and expected (subtracted); all ranks' together are zero

  CallDigest() = default;
  CallDigest(const CallRecord& record, int rank);
};

bool fit_together(const std::vector<CallDigest>& digests);

// The records of the ranks as far as they are known, by rank. The first contradiction among them as one sentence.
using KnownCalls = std::vector<std::optional<CallRecord>>;
std::optional<std::string> find_contradiction(const KnownCalls& calls, const WaitHooks& names = {});

// One line per rank: what it asks, and from where.
std::string table_of(const KnownCalls& calls, const WaitHooks& names = {});

}  // namespace accelerate_cpp::comm
