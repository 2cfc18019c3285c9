// Groups whose ranks are threads, and operations that do nothing but meet.
#pragma once

#include <atomic>
#include <thread>

#include "core/comm/ranks.h"
#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm::testing {

inline Deadline passed() {
  return Deadline::after(std::chrono::milliseconds(0));
}

// Makes a rank wait, outside its group, until another one sets `flag`.
inline void await(const std::atomic<bool>& flag) {
  while (!flag) {
    std::this_thread::yield();
  }
}

// Runs `body(group)` on each of `size` thread ranks, whose hooks `hooks(rank)` makes.
template <class Hooks, class Body>
void run_groups_with(const Hooks& hooks, int size, std::size_t extra_bytes, const Body& body) {
  run_threads(size, [&](Store& store, int rank) {
    Group group(store, rank, size, extra_bytes, soon(), hooks(rank));
    body(group);
  });
}

template <class Body>
void run_groups(int size, std::size_t extra_bytes, const Body& body) {
  run_groups_with([](int) { return WaitHooks(); }, size, extra_bytes, body);
}

template <class Body>
void run_groups(int size, const Body& body) {
  run_groups(size, 0, body);
}

// One operation that only compares descriptions.
inline void compare(Group& group, const Operation& operation, const Call& call = soon()) {
  group.run(operation, call, [&] {
    group.announce();
    group.await_announcements(call.deadline);
  });
}

inline void meet(Group& group, const Call& call = soon()) {
  compare(group, {{CallKind::kBarrier}}, call);
}

inline Operation broadcast_of(std::uint64_t count) {
  Operation operation{{CallKind::kBroadcast, DType::kFloat32}};
  operation.signature.root = 0;
  operation.signature.count = count;
  return operation;
}

}  // namespace accelerate_cpp::comm::testing
