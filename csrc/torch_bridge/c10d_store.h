// A c10d::Store as the core's Store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "core/comm/options.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class C10dStore final : public Store {
 public:
  // `probe` is called every few milliseconds while get() waits.
  C10dStore(c10::intrusive_ptr<::c10d::Store> store, InterruptProbe probe);

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Deadline deadline) override;
  // Stores that cannot forget keep the key.
  void remove(const std::string& key) override;

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
  InterruptProbe probe_;
};

}  // namespace accelerate_cpp::comm
