#include "core/amp/loss_scale.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::amp {
namespace {

// Scales are floats, as in torch. From this value on, the inverse of a scale is finite as well.
constexpr double kSmallest = FLT_MIN;
constexpr double kLargest = FLT_MAX;

double checked_scale(double scale) {
  if (!(scale >= kSmallest && scale <= kLargest)) {
    throw InvalidArgument("a loss scale has to be positive and finite in fp32; found " + std::to_string(scale));
  }
  return scale;
}

const LossScaleOptions& checked(const LossScaleOptions& options) {
  if (!(options.growth_factor > 1.0) || !std::isfinite(options.growth_factor)) {
    throw InvalidArgument("growth_factor of the loss scale has to be above 1; found " +
                          std::to_string(options.growth_factor));
  }
  if (!(options.backoff_factor > 0.0 && options.backoff_factor < 1.0)) {
    throw InvalidArgument("backoff_factor of the loss scale has to be between 0 and 1; found " +
                          std::to_string(options.backoff_factor));
  }
  if (options.growth_interval < 1) {
    throw InvalidArgument("growth_interval of the loss scale has to be at least 1 step; found " +
                          std::to_string(options.growth_interval));
  }
  return options;
}

}  // namespace

LossScale::LossScale(const LossScaleOptions& options)
    : options_(checked(options)), scale_(checked_scale(options.init_scale)) {}

void LossScale::update(bool overflow) {
  if (overflow) {
    scale_ = std::max(scale_ * options_.backoff_factor, kSmallest);
    growth_tracker_ = 0;
    return;
  }
  ++growth_tracker_;
  if (growth_tracker_ >= options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    scale_ = grown <= kLargest ? grown : scale_;
    growth_tracker_ = 0;
  }
}

void LossScale::set(double scale) {
  scale_ = checked_scale(scale);
  growth_tracker_ = 0;
}

void LossScale::restore(double scale, int growth_tracker, const LossScaleOptions& options) {
  if (growth_tracker < 0) {
    throw InvalidArgument("the saved state of a loss scale counts " + std::to_string(growth_tracker) +
                          " steps; expected 0 or more");
  }
  options_ = checked(options);
  scale_ = checked_scale(scale);
  growth_tracker_ = growth_tracker;
}

}  // namespace accelerate_cpp::amp
