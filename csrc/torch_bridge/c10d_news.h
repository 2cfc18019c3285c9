// What ranks of a group tell each other through a store, because an engine only notices processes that end: that a rank
// has failed and why, or that it has left. Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/first_failure.h"

namespace accelerate_cpp::comm {

class C10dNews {
 public:
  using StorePointer = c10::intrusive_ptr<::c10d::Store>;

  // Failures are shared by all groups on `store`, departures by those of the same name.
  C10dNews(StorePointer store, std::string group);

  // The failure of the rank that reported first.
  const FirstFailure& failure() const { return failure_; }
  void tell_failure(const std::string& who, const std::string& reason) noexcept;

  struct Departure {
    std::uint64_t num_operations;  // in which the rank took part; no rank that left took part in fewer
    std::string who;
    std::vector<std::uint64_t> num_messages = {};  // that it has sent to each rank; unknown for the first departure
  };
  std::optional<Departure> departure() const;
  void tell_departure(int rank, const Departure& departure) noexcept;
  // How many messages `rank` has sent to rank `to`, once it has left. Asks the store.
  std::optional<std::uint64_t> messages_of_departed(int rank, int to) const noexcept;

  // Asks the store for what failure() and departure() tell: now, or unless it was asked a moment ago.
  void ask() noexcept;
  void ask_now_and_then() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // Empty if nobody has set it, or if the host of the store is gone, which the engine will report.
  std::string heard(const std::string& key) const noexcept;
  // Sets the key unless it is set already.
  void tell(const std::string& key, const std::string& text) const noexcept;

  const StorePointer store_;
  const std::string group_;
  mutable std::mutex mutex_;
  Clock::time_point last_asked_{};
  std::optional<Departure> departure_;
  FirstFailure failure_;
};

}  // namespace accelerate_cpp::comm
