// What each rank shares about itself. It lies at the start of the rank's segment 0; only the owner writes to it, except
// for the sleepers of its events and for `doorbell`, which peers ring.
//
//   0    event      8   counter that peers sleep on, and how many do
//   8    state      4   RankState
//   12   pid        4
//   16   announced  8   sequence number of the last operation that operations[] describes; the first is 1
//   24   staged     8   pieces this rank has put into its staging slots, over all operations
//   32   consumed   8   pieces whose staged bytes this rank no longer reads
//   40   failed_in  8   sequence number of the operation in which, or before which, it failed; written before the state
//   48   doorbell   8   rung by peers that have posted or taken a message of this rank
//   56   outbox     4   1 + id of the segment with its messages; 0: none yet
//   60   awaited_in_transfer 4    1 + rank that a thread waits for in a transfer; 0: none
//   64   interruptions 8 operations that ended in an error on all ranks alike, as far as the owner has seen
//   72   awaited_in_collective 4  1 + rank that a collective has waited for for a while; 0: none
//   76   doorbell_seen 4      value of the doorbell when the owner last began to look in vain for a transfer it waits
//   for 80   meeting    8   the meeting that it is in; 0: none 88   counted    8   the meeting of which it knows who is
//   in it 96   attendances 8  how often it has entered or left a meeting; odd while it is in one 128  operations
//   descriptions of the operations with even and odd sequence numbers
//   ...  places         where in the user's program those operations were called, once somebody needs to know
//   ...  withdrawals    why the owner does not complete those operations, if it does not
//   ...  failure        why the state is kFailed; written before the state
//   ...  cores          the cores that the owner may run on, a bit each, and its CPU quota; written before peers see it
//   4096 counts         2 x 2 x size x 8: by parity of the sequence number, elements given to and expected from each
//   rank
//
// A description may be overwritten two operations later: by then every peer has announced the operation in between,
// which it does only after it has read the older one. The same holds for places, withdrawals and counts. After an
// operation that ended before every peer had announced it, the owner waits for that before it goes on to the next.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "core/base/cores.h"
#include "core/comm/call_signature.h"
#include "core/comm/shm/event_word.h"

namespace accelerate_cpp::comm {

enum class RankState : std::uint32_t { kRunning, kFailed, kLeft };

// What a rank is about to do: what all ranks must agree on, and how this one takes part.
struct Operation {
  CallSignature signature;
  // Truths, but numbers: a peer whose memory is damaged may leave any byte here.
  std::uint8_t has_counts = 0;  // operands may differ in size: the tables of counts tell whether they fit together
  std::uint8_t in_arena = 0;    // the operand is at (segment, offset_bytes) of this rank's arena
  double factor = 1.0;          // for kPreMulSum
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;

  bool agrees_with(const Operation& other) const { return signature.agrees_with(other.signature, has_counts != 0); }
};

// A text of the owner about one operation.
template <std::size_t kSize>
struct Remark {
  static constexpr std::size_t kBytes = kSize;

  std::atomic<std::uint64_t> sequence;  // of the operation; written after the text
  char text[kBytes];

  void write(std::uint64_t of_sequence, const char* new_text) {
    std::snprintf(text, kBytes, "%s", new_text);
    sequence.store(of_sequence, std::memory_order_release);
  }
  bool is_of(std::uint64_t other) const { return sequence.load(std::memory_order_acquire) == other; }
  std::string_view read() const { return {text, ::strnlen(text, kBytes)}; }  // its owner may have left no zero byte
};

using Place = Remark<200>;  // in the user's program
using Withdrawal = Remark<512>;

struct RankControl {
  static constexpr std::size_t kFailureBytes = 1024;
  // Values of the `awaited_...` fields other than 1 + rank.
  static constexpr std::uint32_t kNobody = 0;
  static constexpr std::uint32_t kAnybody = 0xffffffff;

  EventWord event;
  std::atomic<RankState> state;
  std::int32_t pid;
  std::atomic<std::uint64_t> announced;
  std::atomic<std::uint64_t> staged;
  std::atomic<std::uint64_t> consumed;
  std::uint64_t failed_in;
  EventWord doorbell;
  std::atomic<std::uint32_t> outbox;
  std::atomic<std::uint32_t> awaited_in_transfer;
  alignas(64) std::atomic<std::uint64_t> interruptions;
  std::atomic<std::uint32_t> awaited_in_collective;
  std::atomic<std::uint32_t> doorbell_seen;
  std::atomic<std::uint64_t> meeting;
  std::atomic<std::uint64_t> counted;
  std::atomic<std::uint64_t> attendances;
  alignas(64) Operation operations[2];
  Place places[2];
  Withdrawal withdrawals[2];
  char failure[kFailureBytes];  // to be read by failure_text()
  std::atomic<std::uint64_t> cores[CoreSet::kWords];
  std::atomic<double> quota_cores;
  std::atomic<std::uint64_t> quota_group;

  std::string failure_text() const { return {failure, ::strnlen(failure, kFailureBytes)}; }
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counters are shared between processes");
static_assert(offsetof(RankControl, announced) == 16 && offsetof(RankControl, consumed) == 32 &&
                  offsetof(RankControl, outbox) == 56 && offsetof(RankControl, awaited_in_transfer) == 60 &&
                  offsetof(RankControl, awaited_in_collective) == 72 && offsetof(RankControl, doorbell_seen) == 76 &&
                  offsetof(RankControl, attendances) == 96 && offsetof(RankControl, operations) == 128,
              "see the layout above");

}  // namespace accelerate_cpp::comm
