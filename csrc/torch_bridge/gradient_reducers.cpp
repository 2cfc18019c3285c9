#include "torch_bridge/gradient_reducers.h"

#include <mutex>
#include <utility>

namespace accelerate_cpp::grad {
namespace {

class Reducers {
 public:
  void add(const std::shared_ptr<GradientReducer>& reducer) {
    const std::lock_guard lock(mutex_);
    all_.push_back(reducer);
  }

  std::vector<std::shared_ptr<GradientReducer>> living() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<GradientReducer>> found;
    std::erase_if(all_, [](const std::weak_ptr<GradientReducer>& one) { return one.expired(); });
    for (const std::weak_ptr<GradientReducer>& one : all_) {
      if (auto reducer = one.lock()) {
        found.push_back(std::move(reducer));
      }
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<GradientReducer>> all_;
};

Reducers& reducers() {
  static auto* const instance = new Reducers;  // never destroyed: reducers may outlive static objects
  return *instance;
}

}  // namespace

void add_reducer(const std::shared_ptr<GradientReducer>& reducer) {
  for (const std::shared_ptr<GradientReducer>& other : reducers().living()) {
    other->give_up(*reducer);
  }
  reducers().add(reducer);
}

std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters) {
  std::vector<std::optional<amp::GradientStatistics>> all(parameters.size());
  const std::vector<std::shared_ptr<GradientReducer>> living = reducers().living();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (auto reducer = living.begin(); reducer != living.end() && !all[i]; ++reducer) {
      all[i] = (*reducer)->statistics(parameters[i]);
    }
  }
  return all;
}

}  // namespace accelerate_cpp::grad
