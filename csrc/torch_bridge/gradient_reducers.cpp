#include "torch_bridge/gradient_reducers.h"

#include <atomic>
#include <mutex>

namespace accelerate_cpp::grad {
namespace {

// Weak, because the end of a reducer decides who averages: users must not extend its life.
class Reducers {
 public:
  template <class Action>
  void for_each(const Action& action) {
    const std::lock_guard lock(mutex_);
    for (GradientReducer* const reducer : all_) {
      action(*reducer);
    }
  }

  void add(GradientReducer& reducer) {
    const std::lock_guard lock(mutex_);
    all_.push_back(&reducer);
  }

  void remove(GradientReducer& reducer) {
    const std::lock_guard lock(mutex_);
    std::erase(all_, &reducer);
  }

 private:
  std::mutex mutex_;
  std::vector<GradientReducer*> all_;
};

std::atomic<std::uint64_t> registration_count{0};

Reducers& reducers() {
  static auto* const instance = new Reducers;  // never destroyed: reducers may outlive static objects
  return *instance;
}

// What `result_of` makes of the measurements of one kind.
template <class Kind, class Result, class ResultOf>
std::vector<std::optional<Result>> known(const std::vector<at::Tensor>& parameters, const ResultOf& result_of) {
  std::vector<std::optional<Result>> all(parameters.size());
  reducers().for_each([&](GradientReducer& reducer) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (all[i]) {
        continue;
      }
      const std::optional<Measurement> measurement = reducer.statistics(parameters[i]);
      if (const Kind* const one = measurement ? std::get_if<Kind>(&*measurement) : nullptr) {
        all[i] = result_of(*one);
      }
    }
  });
  return all;
}

}  // namespace

void add_reducer(GradientReducer& reducer) {
  reducers().for_each([&](GradientReducer& other) { other.give_up(reducer); });
  reducers().add(reducer);
}

void remove_reducer(GradientReducer& reducer) {
  reducers().remove(reducer);
}

void note_registration() noexcept {
  registration_count.fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t registrations() noexcept {
  return registration_count.load(std::memory_order_relaxed);
}

std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters) {
  return known<amp::GradientStatistics, amp::GradientStatistics>(
      parameters, [](const amp::GradientStatistics& numbers) { return numbers; });
}

std::vector<std::optional<at::Tensor>> known_device_statistics(const std::vector<at::Tensor>& parameters) {
  return known<DeviceRow, at::Tensor>(parameters, [](const DeviceRow& row) { return row.tensor(); });
}

}  // namespace accelerate_cpp::grad
