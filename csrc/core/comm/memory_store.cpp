#include "core/comm/memory_store.h"

#include <algorithm>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

void MemoryStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::string MemoryStore::get(const std::string& key, Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (values_.find(key) == values_.end()) {
    if (deadline.expired()) {
      throw Timeout("no rank has set '" + key + "' in the store within " + std::to_string(deadline.waited().count()) +
                    " ms");
    }
    changed_.wait_for(lock, std::min(deadline.remaining(), std::chrono::milliseconds(1000)));
  }
  return values_[key];
}

void MemoryStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  values_.erase(key);
}

}  // namespace accelerate_cpp::comm
