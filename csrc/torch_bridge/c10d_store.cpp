#include "torch_bridge/c10d_store.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

// Between two looks for a key. (Store::wait() does not help: a FileStore checks its timeout once a second and throws an
// error like any other, and a TCPStore writes to the log.)
constexpr std::chrono::milliseconds kLookInterval{5};

}  // namespace

C10dStore::C10dStore(c10::intrusive_ptr<::c10d::Store> store, InterruptProbe probe)
    : store_(std::move(store)), probe_(probe ? std::move(probe) : [] {}) {}

void C10dStore::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::string C10dStore::get(const std::string& key, Deadline deadline) {
  while (!store_->check({key})) {
    probe_();
    if (deadline.expired()) {
      throw Timeout("no rank has set '" + key + "' in the store within " + std::to_string(deadline.waited().count()) +
                    " ms; check that all ranks were started");
    }
    std::this_thread::sleep_for(std::min(deadline.remaining(), kLookInterval));
  }
  const std::vector<std::uint8_t> value = store_->get(key);
  return {value.begin(), value.end()};
}

void C10dStore::remove(const std::string& key) {
  try {
    store_->deleteKey(key);
  } catch (const std::exception&) {
  }
}

}  // namespace accelerate_cpp::comm
