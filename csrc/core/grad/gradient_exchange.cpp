#include "core/grad/gradient_exchange.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/base/check.h"
#include "core/base/error.h"

namespace accelerate_cpp::grad {

GradientExchange::GradientExchange(std::vector<BucketSpec> buckets)
    : buckets_(std::move(buckets)), published_(buckets_.size(), false) {
  for (const BucketSpec& spec : buckets_) {
    first_slot_.push_back(first_slot_.back() + spec.slots.size());
  }
  used_.resize(first_slot_.back());
  used_anywhere_.resize(first_slot_.back());
}

MemoryView GradientExchange::bucket(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size(),
                   "bucket " + std::to_string(index) + " of " + std::to_string(buckets_.size()));
  return {memory(index), buckets_[index].count, buckets_[index].dtype};
}

std::uint8_t* GradientExchange::used_slots(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size(),
                   "bucket " + std::to_string(index) + " of " + std::to_string(buckets_.size()));
  return used_.data() + first_slot_[index];
}

void GradientExchange::check_slot(std::size_t index, std::size_t slot) const {
  ACCELERATE_CHECK(index < buckets_.size() && slot < buckets_[index].slots.size(),
                   "slot " + std::to_string(slot) + " of bucket " + std::to_string(index));
}

bool GradientExchange::used_anywhere(std::size_t index, std::size_t slot) const {
  check_slot(index, slot);
  return used_anywhere_[first_slot_[index] + slot] != 0;
}

std::optional<amp::GradientStatistics> GradientExchange::statistics(std::size_t index, std::size_t slot) const {
  check_slot(index, slot);
  return measured(index, slot);
}

amp::GradientStatistics GradientExchange::measure(std::size_t index, std::size_t slot, ConstMemoryView gradient) const {
  check_slot(index, slot);
  ACCELERATE_CHECK(gradient.count == buckets_[index].slots[slot].count, "a gradient has the elements of its slot");
  return measured_alike(index, slot, gradient);
}

void GradientExchange::reset(const RoundOptions& options) {
  options_ = options;
  published_.assign(buckets_.size(), false);
}

void GradientExchange::begin(const RoundOptions& options, Deadline deadline) {
  if (options.weight) {
    checked_weight(*options.weight);
  }
  reset(options);
  start_round(deadline);
}

void GradientExchange::publish(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size() && !published_[index],
                   "bucket " + std::to_string(index) + " is published once per round");
  published_[index] = true;
  hand_over(index);
}

void GradientExchange::wait_for_turn() const {
  if (queue_) {
    queue_->drain();
  }
}

void GradientExchange::finish(Deadline deadline) {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    ACCELERATE_CHECK(published_[index], "bucket " + std::to_string(index) + " is published before finish()");
  }
  wait_for_turn();
  used_anywhere_ = used_;
  divisor_ = complete({used_anywhere_.data(), used_anywhere_.size(), DType::kUInt8}, deadline);
  reset({});
  reset_round();
}

double checked_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0.0) {
    throw InvalidArgument("the weight of gradients is " + std::to_string(weight) +
                          "; expected a finite number that is not negative, such as a number of tokens");
  }
  return weight;
}

}  // namespace accelerate_cpp::grad
