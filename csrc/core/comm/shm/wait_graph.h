// Which rank of a group waits for which, so that a rank can tell that others wait for it.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>

#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {

// Whether `rank` waits, for a collective or a message, for `target`, or for others that do. A rank shows for a moment
// longer that it waits for a message that has come; without `unlooked_counts`, a wait for a message only counts if the
// rank has looked since its doorbell was rung.
bool waits_for(const Group& group, int rank, int target, bool unlooked_counts = true);

// Publishes what this rank waits for in point-to-point transfers, in all its threads. Thread-safe.
class PublishedWaits {
 public:
  explicit PublishedWaits(RankControl& own) : own_(own) {}

  // The wait of one thread, for as long as it lives.
  class Wait {
   public:
    explicit Wait(PublishedWaits& waits) : waits_(waits) {}
    ~Wait() { set(RankControl::kNobody); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    // A rank + 1, RankControl::kNobody or kAnybody. Returns whether that is new.
    bool set(std::uint32_t for_whom);

   private:
    PublishedWaits& waits_;
    std::uint32_t for_whom_ = RankControl::kNobody;
  };

 private:
  std::mutex mutex_;
  RankControl& own_;
  std::list<std::uint32_t> waits_;
};

}  // namespace accelerate_cpp::comm
