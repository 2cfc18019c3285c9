// Two families of errors. A caller can act on InvalidArgument, Timeout, PeerLost, MismatchedCollective and
// SystemFailure; InternalError says that an invariant of this library is broken. Messages say what, where, expected,
// found and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace accelerate_cpp {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InvalidArgument : public Error {
 public:
  using Error::Error;
};

class Timeout : public Error {
 public:
  using Error::Error;
};

class PeerLost : public Error {
 public:
  using Error::Error;
};

// A PeerLost who left in good order: what others do does not concern it.
class PeerLeft : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

// A PeerLost who takes no part in one collective, and in the next ones again: every rank raised.
class PeerWithdrew : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

class MismatchedCollective : public Error {
 public:
  using Error::Error;
};

class SystemFailure : public Error {
 public:
  // `call` names the system call or resource; the text of `error_number` (an errno value) is appended.
  SystemFailure(const std::string& call, int error_number);

  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace accelerate_cpp
