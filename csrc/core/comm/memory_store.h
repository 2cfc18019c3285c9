// A Store inside one process, for ranks that are threads.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  void remove(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace accelerate_cpp::comm
