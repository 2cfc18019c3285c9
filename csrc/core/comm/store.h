// A small shared dictionary through which ranks find each other before they can communicate.
#pragma once

#include <string>

#include "core/base/deadline.h"

namespace accelerate_cpp::comm {

// Thread-safe. Keys are written once; values are arbitrary bytes.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Waits until somebody has set `key`; throws Timeout when `deadline` passes first.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;
};

}  // namespace accelerate_cpp::comm
