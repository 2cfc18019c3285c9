// Compares what all ranks ask for before any of them moves data, for engines that would hang or crash on a difference.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/call.h"
#include "core/comm/call_record.h"

namespace accelerate_cpp::comm {

class CallCheck {
 public:
  // Hands `own` to all ranks and returns what all ranks handed in, one after the other in rank order. All ranks pass
  // equally many bytes.
  using AllGather = std::function<std::string(const std::string& own)>;

  // Once a mismatch is to be reported, `hooks` are asked for the place of a call that has none, and what ranks are
  // called.
  CallCheck(int rank, WaitHooks hooks) : rank_(rank), hooks_(std::move(hooks)) {}

  // Whether the digests of all ranks fit together; the same answer on all of them, once all have asked.
  using Agree = std::function<bool(const CallDigest& own)>;

  // Collective. Throws MismatchedCollective, with the same table on every rank, when the records do not fit together.
  // Returns when every rank has entered it. While all is well it does nothing but `agree`, or gather 16 bytes of each
  // rank.
  //
  // If some ranks are in a meeting, those in the same one as the lowest of them return the list of its ranks, and the
  // others keep waiting until all agree. Empty if all agree.
  std::vector<int> check(CallRecord record, const Call& call, const Agree& agree, const AllGather& all_gather);
  void check(CallRecord record, const Call& call, const AllGather& all_gather);

 private:
  KnownCalls gather_records(CallRecord record, const Call& call, const AllGather& all_gather) const;
  [[noreturn]] void throw_mismatch(const KnownCalls& calls) const;

  int rank_;
  WaitHooks hooks_;
  std::uint64_t sequence_ = 0;
};

}  // namespace accelerate_cpp::comm
