// Why a group has failed on this rank.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

// "barrier cannot run: the group has failed on rank 1: …".
PeerLost group_failed(const std::string& operation, int rank, const std::string& reason);

// The message of the exception that is being handled; `otherwise` if it has none.
std::string reason_in_flight(const std::string& otherwise);

// The first reason stays. Thread-safe.
class FirstFailure {
 public:
  // Whether this is the first reason.
  bool set(const std::string& reason);

  std::optional<std::string> reason() const;

  // Throws group_failed() once there is a reason.
  void check(const std::string& operation, int rank) const;

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> reason_;
};

}  // namespace accelerate_cpp::comm
