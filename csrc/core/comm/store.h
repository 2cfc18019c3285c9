// A small shared dictionary through which ranks find each other before they can communicate.
#pragma once

#include <string>

#include "core/base/deadline.h"

namespace accelerate_cpp::comm {

// Thread-safe. Nobody writes a key that is there; values are arbitrary bytes.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Waits until somebody has set `key`; throws Timeout when `deadline` passes first.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;

  // Forgets `key`, which nobody will ask for any more: the next group that goes by the same name must not find it. Does
  // nothing in a store that serves one group.
  virtual void remove(const std::string& /*key*/) {}
};

}  // namespace accelerate_cpp::comm
