// Keeps posted sends and receives moving while nobody waits for them.
//
// A Transfer moves on when somebody waits for it or polls it, and whoever waits moves all transfers of the communicator
// on. A thread of the pump's own does that for transfers that have been pending for a grace period while nobody waits;
// it starts with the first transfer that does not end at once. It is not the thread of WorkQueue, which may be held up
// in a collective that the peer of a transfer enters only after the transfer.
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

  // Does not wait for anything. What the transfers that are still pending hold stays alive for good, since their
  // communicator may yet read or write it.
  ~TransferPump();
  TransferPump(const TransferPump&) = delete;
  TransferPump& operator=(const TransferPump&) = delete;

  // Takes over a transfer. When it has completed well, `finish` is called once, in whichever thread notices, before it
  // counts as ended; what `finish` throws becomes its error. `finish` holds whatever the transfer needs until it ends.
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
