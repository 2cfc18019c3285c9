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

// The peer left in good order. Other ranks may go on without it.
class PeerLeft : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

// The peer withdrew from one collective and takes part in the next ones again. Every rank raises an error for it.
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
