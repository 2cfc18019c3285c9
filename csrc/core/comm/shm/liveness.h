// Whether another process is still there.
#pragma once

#include <sys/types.h>

namespace accelerate_cpp::comm {

// Watches one process through a pidfd, so that a reused process id is never mistaken for it. Where the kernel refuses
// one (old kernels, some sandboxes, another PID namespace) ended() stays false, and the peer's socket has to show it.
class ProcessWatch {
 public:
  using Open = int (*)(pid_t);

  // `open` stands for pidfd_open, so that tests can refuse it.
  explicit ProcessWatch(pid_t process, Open open = open_pidfd);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&&) = delete;
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool ended() const;

  static int open_pidfd(pid_t process);

 private:
  int descriptor_;
};

}  // namespace accelerate_cpp::comm
