// What ranks of a group tell each other through a store, because an engine only notices processes that end: that a rank
// has failed and why, or that it has left. Thread-safe.
//
// A store that cannot be reached may never answer: its host is stopped, or the network between has been cut. So threads
// of their own ask it, one at a time, and nobody waits long for them.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/comm/first_failure.h"

namespace accelerate_cpp::comm {

class C10dNews {
 public:
  using StorePointer = c10::intrusive_ptr<::c10d::Store>;

  // Failures are shared by all groups on `store`, departures by those of the same name.
  C10dNews(StorePointer store, std::string group);

  // The failure of the rank that reported first.
  const FirstFailure& failure() const { return heard_->failure; }
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

  // What was heard, and whether the store is being asked.
  struct Heard {
    std::mutex mutex;
    std::condition_variable changed;
    bool busy = false;
    Clock::time_point last_asked{};
    std::optional<Departure> departure;
    FirstFailure failure;
  };
  using Task = std::function<void(::c10d::Store& store)>;

  // Has `task` done by a thread, and waits a while for its end, and before for that of the one that is under way if
  // `turn` says so. Whether it was done in that time. The task may outlive this object.
  bool perform(Task task, std::chrono::milliseconds turn, std::chrono::milliseconds patience) const noexcept;
  // Sets the key unless it is set already.
  void tell(std::string key, std::string text) const noexcept;

  const StorePointer store_;
  const std::string group_;
  const OwnerProcess process_;
  const std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
};

}  // namespace accelerate_cpp::comm
