#include "core/comm/shm/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace accelerate_cpp::comm {
namespace {

struct Guarded {
  std::mutex mutex;
  std::set<int> descriptors;
};

Guarded& guarded() {
  static Guarded* const instance = new Guarded;  // never destroyed: fork handlers may run at any time
  return *instance;
}

void before_fork() {
  guarded().mutex.lock();
}

void after_fork_in_parent() {
  guarded().mutex.unlock();
}

void after_fork_in_child() {
  for (const int descriptor : guarded().descriptors) {
    ::close(descriptor);
  }
  guarded().descriptors.clear();
  guarded().mutex.unlock();
}

}  // namespace

void close_after_fork(int descriptor) {
  static const int installed = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)installed;
  const std::lock_guard lock(guarded().mutex);
  guarded().descriptors.insert(descriptor);
}

void close_now(int descriptor) {
  const std::lock_guard lock(guarded().mutex);
  if (guarded().descriptors.erase(descriptor) == 1) {
    ::close(descriptor);
  }
}

}  // namespace accelerate_cpp::comm
