#include "core/offload/ahead_plan.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::offload {

AheadPlan::AheadPlan(std::vector<std::size_t> unit_bytes, std::size_t window_bytes, Granularity granularity)
    : unit_bytes_(std::move(unit_bytes)),
      window_bytes_(window_bytes),
      total_bytes_(std::accumulate(unit_bytes_.begin(), unit_bytes_.end(), std::size_t{0})),
      granularity_(granularity),
      follower_(unit_bytes_.size()),
      is_in_(unit_bytes_.size(), false) {
  for (std::size_t unit = 0; unit < follower_.size(); ++unit) {
    follower_[unit] = unit + 1 == follower_.size() ? 0 : unit + 1;
  }
}

bool AheadPlan::arrive(std::size_t unit) {
  if (unit >= num_units()) {
    throw InvalidArgument("unit " + std::to_string(unit) + " of " + std::to_string(num_units()) +
                          " units of weights: there is no such unit");
  }
  first_ = first_.value_or(unit);
  if (!fetched_.empty() && fetched_.front().unit == unit) {  // layers may share weights
    return false;
  }
  if (!fetched_.empty()) {
    follower_[fetched_.front().unit] = unit;
  }
  const bool begun = has(unit);
  if (!begun) {
    start_over(unit);
    return false;
  }
  while (fetched_.front().unit != unit) {
    is_in_[fetched_.front().unit] = false;
    fetched_.pop_front();
    bytes_ahead_ -= fetched_.front().bytes;
  }
  return true;
}

void AheadPlan::start_over(std::size_t unit) {
  for (const Fetched& each : fetched_) {
    is_in_[each.unit] = false;
  }
  fetched_.assign(1, {unit, granularity_ == Granularity::kWholeUnits ? unit_bytes_[unit] : 0});
  is_in_[unit] = true;
  bytes_ahead_ = 0;
}

std::optional<std::size_t> AheadPlan::expected() const {
  const std::size_t unit = follower_[fetched_.back().unit];
  const bool is_whole = granularity_ == Granularity::kWholeUnits;
  const std::size_t needed = is_whole ? unit_bytes_[unit] : 1;
  const bool is_next_pass = is_whole && unit == first_;
  return is_in_[unit] || is_next_pass || needed > window_bytes_ - bytes_ahead_ ? std::nullopt : std::optional(unit);
}

std::optional<AheadPlan::Step> AheadPlan::next(std::size_t most_bytes) {
  if (fetched_.empty()) {
    return std::nullopt;
  }
  while (fetched_.back().bytes == bytes_of(fetched_.back())) {
    const std::optional<std::size_t> unit = expected();
    if (!unit.has_value()) {
      return std::nullopt;
    }
    fetched_.push_back({*unit, 0});
    is_in_[*unit] = true;
  }
  Fetched& last = fetched_.back();
  std::size_t bytes = bytes_of(last) - last.bytes;
  const bool is_present = fetched_.size() == 1;
  if (granularity_ == Granularity::kPieces) {
    bytes = std::min({bytes, most_bytes, is_present ? bytes : window_bytes_ - bytes_ahead_});
  }
  if (bytes == 0) {
    return std::nullopt;
  }
  const Step step{last.unit, last.bytes, bytes};
  last.bytes += bytes;
  bytes_ahead_ += is_present ? 0 : bytes;
  return step;
}

bool AheadPlan::is_behind() const {
  if (fetched_.empty()) {
    return false;
  }
  if (granularity_ == Granularity::kWholeUnits) {
    return expected().has_value();
  }
  const Fetched& present = fetched_.front();
  const std::size_t wanted = std::min(window_bytes_, total_bytes_ - bytes_of(present));
  return present.bytes < bytes_of(present) || bytes_ahead_ < wanted - wanted / 4;
}

bool AheadPlan::has(std::size_t unit) const {
  return is_in_[unit] && fetched_.front().unit != unit;
}

}  // namespace accelerate_cpp::offload
