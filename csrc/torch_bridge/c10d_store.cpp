#include "torch_bridge/c10d_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

C10dStore::C10dStore(c10::intrusive_ptr<::c10d::Store> store, InterruptProbe probe)
    : store_(std::move(store)), probe_(probe ? std::move(probe) : [] {}) {}

void C10dStore::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::string C10dStore::get(const std::string& key, Deadline deadline) {
  while (true) {
    try {
      const auto slice = std::min(deadline.remaining(), std::chrono::milliseconds(1000));
      store_->wait({key}, std::max(slice, std::chrono::milliseconds(1)));
      break;
    } catch (const c10::DistStoreError& error) {
      probe_();
      if (deadline.expired()) {
        throw Timeout("no rank has set '" + key + "' in the store within " + std::to_string(deadline.waited().count()) +
                      " ms: " + error.what_without_backtrace());
      }
    }
  }
  const std::vector<std::uint8_t> value = store_->get(key);
  return {value.begin(), value.end()};
}

}  // namespace accelerate_cpp::comm
