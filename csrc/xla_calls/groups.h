// The communicators that compiled programs of XLA use, by number: a program can hold a number among its constants.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/comm/all_reduce_together.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::xla_calls {

// Called with an exception that is none of the core's, such as one that a wait hook has thrown: the text that says what
// it was.
using Describe = std::function<std::string(const std::exception_ptr&)>;

// The processes that take part in the calls of a program.
class Group {
 public:
  Group(std::shared_ptr<comm::Communicator> communicator, std::chrono::milliseconds timeout, Describe describe)
      : communicator_(std::move(communicator)),
        timeout_(timeout),
        describe_(std::move(describe)),
        together_(communicator_) {}

  comm::Communicator& communicator() { return *communicator_; }
  comm::AllReduceTogether& together() { return together_; }
  Deadline deadline() const { return Deadline::after(timeout_); }
  // Held during a call: programs of several threads may run at once.
  std::mutex& mutex() { return mutex_; }

  // "PeerLost: rank 1 …": the kind of an error in front of its message, so that it survives as text.
  std::string text_of(const std::exception_ptr& error) const;

 private:
  const std::shared_ptr<comm::Communicator> communicator_;
  const std::chrono::milliseconds timeout_;
  const Describe describe_;
  comm::AllReduceTogether together_;
  std::mutex mutex_;
};

// Registers a group, for as long as forget_group() is not called, and returns its number. From any thread.
std::int64_t register_group(std::shared_ptr<Group> group);

// Throws InvalidArgument if there is none, as in a process forked from the one that compiled the program.
std::shared_ptr<Group> group_of(std::int64_t number);

// Calls that are under way keep theirs.
void forget_group(std::int64_t number);

}  // namespace accelerate_cpp::xla_calls
