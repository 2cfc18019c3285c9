#include "core/comm/shm/event_word.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace accelerate_cpp::comm {

void EventWord::notify() noexcept {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void EventWord::sleep(std::uint32_t seen, std::chrono::milliseconds limit) noexcept {
  timespec duration{};
  duration.tv_sec = limit.count() / 1000;
  duration.tv_nsec = (limit.count() % 1000) * 1000000;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen) {
    ::syscall(SYS_futex, &value, FUTEX_WAIT, seen, &duration, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void EventWord::relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void EventWord::yield() noexcept {
  ::sched_yield();
}

}  // namespace accelerate_cpp::comm
