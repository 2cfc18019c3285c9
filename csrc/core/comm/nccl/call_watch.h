// The wait for one collective. NCCL says nothing when another rank calls something else, is late, has failed or has
// left; so a rank whose wait lasts writes on the group's board what it waits for, reads what the others wrote there,
// and raises what it finds: a contradiction on every rank within about a second, a failure or an early leave of another
// rank.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/comm/call_record.h"
#include "core/comm/nccl/nccl_group.h"
#include "core/comm/nccl/patience.h"

namespace accelerate_cpp::comm {

class CallWatch {
 public:
  // Of operation number `sequence`; the wait begins now. `group` must outlive this object.
  CallWatch(NcclGroup& group, CallRecord record, std::uint64_t sequence, Deadline deadline);

  // Lets a moment pass. Throws PeerLost, MismatchedCollective, Timeout when the deadline has passed, or what the user's
  // probe throws.
  void pause();

  // For ranks that know that they do not fit together: the calls of all, found within two seconds, as the message of a
  // MismatchedCollective.
  std::string explain_mismatch();

  // "all_reduce(sum) of 10 float32 (operation 17) on rank 0 of 2 (cuda:0)".
  std::string title() const;

 private:
  void look();
  void publish();
  void read_calls();
  void check_for_leavers();
  std::string mismatch_text(const std::string& contradiction) const;
  std::string timeout_text() const;
  std::string waiting_text() const;

  NcclGroup& group_;
  std::uint64_t sequence_;
  Patience patience_;
  std::chrono::milliseconds next_look_;
  KnownCalls calls_;  // by rank; our own is always there
  bool published_ = false;
  int next_peer_ = 0;  // where the next reading of calls goes on
};

}  // namespace accelerate_cpp::comm
