// What happens when a rank's backward pass fails: how the other ranks are made to raise as well, so that all can go on
// together, and which collectives end for good.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/comm/communicator.h"

namespace accelerate_cpp::grad {

class PassFailure {
 public:
  using End = std::function<void()>;  // ends collectives that ranks have begun differently, which nothing takes back

  // `end_device_group` is empty where no process group sums the buckets.
  PassFailure(std::shared_ptr<comm::Communicator> communicator, End end_device_group)
      : communicator_(std::move(communicator)), end_device_group_(std::move(end_device_group)) {
    begin_pass();
  }

  void begin_pass() { interruptions_ = communicator_->interruptions(); }

  // Throws PeerLost once the process group that sums buckets has ended.
  void check_group() const;

  // The collectives of a communication hook, which end, with the communicator, when a pass fails.
  void set_hook(End end_collectives) { end_hook_ = std::move(end_collectives); }

  // The pass has failed here. `others_may_complete` says whether other ranks may still complete it; then the
  // communicator ends as well.
  void tell(const std::string& reason, bool others_may_complete, Deadline deadline) noexcept;

 private:
  void withdraw(const std::string& reason, Deadline deadline) noexcept;
  static void end(const End& collectives) noexcept;

  const std::shared_ptr<comm::Communicator> communicator_;
  const End end_device_group_;
  End end_hook_;
  std::uint64_t interruptions_ = 0;  // of the communicator, when the pass began
  std::string why_group_ended_;      // the device group; empty: it has not
};

}  // namespace accelerate_cpp::grad
