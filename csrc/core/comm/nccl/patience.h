// How a host thread passes the time until a GPU has finished: it looks again at once while the wait is short, then ever
// less often, and lets the user interrupt.
#pragma once

#include <chrono>

#include "core/base/deadline.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

class Patience {
 public:
  // `hooks` must outlive this object. The wait begins now.
  Patience(Deadline deadline, const WaitHooks& hooks);

  // Lets a moment pass, at most a millisecond. Throws what the probe throws, which is asked every 50 ms.
  void pause();

  bool expired() const { return deadline_.expired(); }
  const Deadline& deadline() const { return deadline_; }
  std::chrono::milliseconds waited() const;

  // True the first time that it is asked after `warn_after` has passed.
  bool warn_now();

 private:
  using Clock = std::chrono::steady_clock;

  Deadline deadline_;
  const WaitHooks& hooks_;
  Clock::time_point start_;
  Clock::time_point next_probe_;
  bool warned_ = false;
};

}  // namespace accelerate_cpp::comm
