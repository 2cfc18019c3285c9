#include "core/comm/first_failure.h"

namespace accelerate_cpp::comm {

PeerLost group_failed(const std::string& operation, int rank, const std::string& reason) {
  return PeerLost(operation + " cannot run: the group has failed on rank " + std::to_string(rank) + ": " + reason);
}

std::string reason_in_flight(const std::string& otherwise) {
  try {
    throw;
  } catch (const std::exception& error) {
    return *error.what() == '\0' ? otherwise : error.what();
  } catch (...) {
    return otherwise;
  }
}

bool FirstFailure::set(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (reason_) {
    return false;
  }
  reason_ = reason;
  return true;
}

std::optional<std::string> FirstFailure::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void FirstFailure::check(const std::string& operation, int rank) const {
  if (const auto why = reason()) {
    throw group_failed(operation, rank, *why);
  }
}

}  // namespace accelerate_cpp::comm
