// Which slots of gradient buckets have a gradient, on this rank and on any: for exchanges that have no memory in common
// with their peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/check.h"
#include "core/comm/gradient_exchange.h"

namespace accelerate_cpp::comm {

class UsedSlots {
 public:
  explicit UsedSlots(const std::vector<BucketSpec>& buckets) {
    for (const BucketSpec& spec : buckets) {
      first_.push_back(first_.back() + spec.slots.size());
    }
    own_.resize(first_.back());
    anywhere_.resize(first_.back());
  }

  // One byte per slot of the bucket, which the caller writes.
  std::uint8_t* own(std::size_t bucket) {
    ACCELERATE_CHECK(bucket + 1 < first_.size(), "bucket " + std::to_string(bucket));
    return own_.data() + first_[bucket];
  }

  // As reduce() has found it.
  bool anywhere(std::size_t bucket, std::size_t slot) const {
    ACCELERATE_CHECK(bucket + 1 < first_.size() && slot < first_[bucket + 1] - first_[bucket],
                     "slot " + std::to_string(slot) + " of bucket " + std::to_string(bucket));
    return anywhere_[first_[bucket] + slot] != 0;
  }

  // `reduce_max` replaces a view of the host's memory by the maxima over the ranks.
  template <class ReduceMax>
  void reduce(const ReduceMax& reduce_max) {
    anywhere_ = own_;
    if (!anywhere_.empty()) {
      reduce_max(MemoryView{anywhere_.data(), anywhere_.size(), DType::kUInt8});
    }
  }

 private:
  std::vector<std::size_t> first_{0};   // of each bucket, among the slots of all; and one past the last
  std::vector<std::uint8_t> own_;       // by slot, as the caller wrote it
  std::vector<std::uint8_t> anywhere_;  // of the finished round
};

}  // namespace accelerate_cpp::comm
