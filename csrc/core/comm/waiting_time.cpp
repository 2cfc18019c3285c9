#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {
namespace {

thread_local std::chrono::nanoseconds waited{0};
thread_local int depth = 0;

}  // namespace

std::chrono::nanoseconds time_waited() noexcept {
  return waited;
}

Waiting::Waiting() noexcept : began_(std::chrono::steady_clock::now()) {
  ++depth;
}

Waiting::~Waiting() {
  if (--depth == 0) {
    waited += std::chrono::steady_clock::now() - began_;
  }
}

}  // namespace accelerate_cpp::comm
