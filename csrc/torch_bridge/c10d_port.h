// Messages of a torch process group as transfers that can be polled.
//
// Gloo can only wait for a message, not ask whether it has come, and its waits may not time out. So threads wait: one
// for the envelopes of each rank, one for the data of each, and one for what was sent. Each waits for one work
// after the other; none can be held up by a message that its sender has not posted.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/message_matcher.h"
#include "torch_bridge/c10d_engine.h"

namespace accelerate_cpp::comm {

class C10dPort : public MessageMatcher::Port {
 public:
  // Data that is sent is copied and complete at once.
  static std::shared_ptr<C10dPort> make(std::shared_ptr<C10dEngine> engine);

  // Waits until everything that was sent has left, at most until `deadline`. Returns whether it has.
  virtual bool flush(Deadline deadline) = 0;

  // Envelopes that were sent to each rank.
  virtual std::vector<std::uint64_t> num_sent() const = 0;
};

}  // namespace accelerate_cpp::comm
