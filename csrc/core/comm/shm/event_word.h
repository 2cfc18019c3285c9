// A counter in shared memory on which other processes can sleep.
//
// The owner changes what it shares, then calls notify(). A waiter calls wait_until() with a condition over shared
// atomics.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace accelerate_cpp::comm {

// What a waiter does before it sleeps.
struct SpinLimits {
  int looks;   // one right after the other
  int yields;  // then: looks with the core offered to others in between
};

struct EventWord {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  // Wakes all sleepers. Changes made before it are visible to a waiter that it wakes.
  void notify() noexcept;

  // Sleeps until the next notify(), at most `limit`. `seen` is the value read before the condition was last found
  // false; returns at once if the value has changed since.
  void sleep(std::uint32_t seen, std::chrono::milliseconds limit) noexcept;

  // Waits until `condition` holds. `tick` runs about every 50 ms while asleep and may throw to give up.
  template <class Condition, class Tick>
  void wait_until(const Condition& condition, const SpinLimits& limits, const Tick& tick) {
    for (int i = 0; i < limits.looks; ++i) {
      if (condition()) {
        return;
      }
      relax();
    }
    for (int i = 0; i < limits.yields; ++i) {
      if (condition()) {
        return;
      }
      yield();
    }
    while (true) {
      const std::uint32_t seen = value.load(std::memory_order_seq_cst);
      if (condition()) {
        return;
      }
      sleep(seen, std::chrono::milliseconds(50));
      if (condition()) {
        return;
      }
      tick();
    }
  }

 private:
  static void relax() noexcept;
  static void yield() noexcept;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "futexes need plain 32-bit words");
static_assert(sizeof(EventWord) == 8, "the layout is shared between processes");

}  // namespace accelerate_cpp::comm
