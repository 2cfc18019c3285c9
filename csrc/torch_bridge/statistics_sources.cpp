#include "torch_bridge/statistics_sources.h"

#include <mutex>

namespace accelerate_cpp::grad {
namespace {

struct Sources {
  std::mutex mutex;
  std::vector<StatisticsSource*> all;
};

Sources& sources() {
  static auto* const instance = new Sources;  // never destroyed: sources may outlive static objects
  return *instance;
}

}  // namespace

StatisticsSource::StatisticsSource() {
  const std::lock_guard lock(sources().mutex);
  sources().all.push_back(this);
}

StatisticsSource::~StatisticsSource() {
  forget_source();
}

void StatisticsSource::forget_source() {
  const std::lock_guard lock(sources().mutex);
  std::erase(sources().all, this);
}

std::vector<std::optional<amp::GradientStatistics>> known_statistics(const std::vector<at::Tensor>& parameters) {
  std::vector<std::optional<amp::GradientStatistics>> known(parameters.size());
  const std::lock_guard lock(sources().mutex);
  for (StatisticsSource* const source : sources().all) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!known[i]) {
        known[i] = source->statistics(parameters[i]);
      }
    }
  }
  return known;
}

}  // namespace accelerate_cpp::grad
