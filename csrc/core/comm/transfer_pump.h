// Keeps posted sends and receives moving while nobody waits for them.
//
// A Transfer makes progress when it is waited for or polled, and every waiter makes progress on all transfers of its
// communicator. If nobody waits, a thread of the pump does so for transfers that have been pending for a grace period;
// it starts with the first transfer that does not end at once. It is not WorkQueue's thread, because that may be
// blocked in a collective that the peer enters only after the transfer.
//
// Thread-safe. In a forked child there is no thread, and the communicator refuses to work.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "core/comm/communicator.h"
#include "core/comm/pending.h"

namespace accelerate_cpp::comm {

class TransferPump {
 public:
  static constexpr std::chrono::milliseconds kGrace{1};

  explicit TransferPump(std::chrono::milliseconds grace = kGrace);

  // Does not wait. Whatever pending transfers hold stays alive for good, since their communicator may still read or
  // write it.
  ~TransferPump();
  TransferPump(const TransferPump&) = delete;
  TransferPump& operator=(const TransferPump&) = delete;

  // Takes over a transfer. When it has succeeded, `finish` is called once, in the thread that notices, before it counts
  // as ended; what `finish` throws becomes its error. `finish` holds whatever the transfer needs until it ends.
  std::shared_ptr<Pending> post(std::shared_ptr<Transfer> transfer, std::function<void()> finish);

  // Ends the thread. Transfers that are pending can still be waited for.
  void stop();

 private:
  class HeldUp;
  class Posted;
  class Waiting;
  struct State;

  const std::shared_ptr<State> state_;
};

}  // namespace accelerate_cpp::comm
