#include "core/comm/shm/liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace accelerate_cpp::comm {

int ProcessWatch::open_pidfd(pid_t process) {
  return static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
}

ProcessWatch::ProcessWatch(pid_t process, Open open)
    : descriptor_(process > 0 && process != ::getpid() ? open(process) : -1) {}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

bool ProcessWatch::ended() const {
  pollfd entry{descriptor_, POLLIN, 0};
  return descriptor_ >= 0 && ::poll(&entry, 1, 0) > 0;
}

}  // namespace accelerate_cpp::comm
