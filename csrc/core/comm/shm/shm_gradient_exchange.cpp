#include "core/comm/shm/shm_gradient_exchange.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/round_up.h"
#include "core/base/view_parts.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {
namespace {

// While averages are measured, so many bytes of them are taken at a time, which stay in the first-level cache until
// they are measured.
constexpr std::size_t kMeasuredBytes = std::size_t{8} << 10;

// A fingerprint of the bucket layout, so that ranks with different models are told apart before they exchange anything.
std::uint64_t fingerprint(const std::vector<BucketSpec>& buckets) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const BucketSpec& spec : buckets) {
    mix(static_cast<std::uint64_t>(spec.dtype));
    mix(spec.count);
    mix(spec.slots.size());
  }
  return hash;
}

}  // namespace

ShmGradientExchange::ShmGradientExchange(ShmCommunicator& communicator, std::shared_ptr<Group> group,
                                         const std::vector<BucketSpec>& buckets, Deadline deadline)
    : group_(std::move(group)),
      segments_(static_cast<std::size_t>(group_->size())),
      places_(static_cast<std::size_t>(group_->size())) {
  for (const BucketSpec& spec : buckets) {
    buckets_.push_back({spec, 0, num_slots_});
    num_slots_ += spec.slots.size();
  }
  headers_offset_ = (buckets.size() + 1) * sizeof(Counter);
  statistics_offset_ = headers_offset_ + 2 * sizeof(RoundHeader);
  used_offset_ = statistics_offset_ + 2 * num_slots_ * sizeof(amp::GradientStatistics);
  std::size_t offset = used_offset_ + 2 * num_slots_;
  for (Bucket& bucket : buckets_) {
    bucket.data_offset = round_up(offset, 64);
    offset = bucket.data_offset + bucket.spec.count * element_size(bucket.spec.dtype);
  }
  block_ = std::make_unique<OwnedBlock>(group_->arena(), offset);
  segments_[static_cast<std::size_t>(group_->rank())] = block_->segment();
  set_options({});

  struct Home {
    std::uint64_t layout;
    std::uint64_t segment;
  };
  const Home own{fingerprint(buckets), block_->id()};
  std::vector<Home> places(segments_.size());
  std::vector<MemoryView> outputs;
  for (Home& place : places) {
    outputs.push_back({&place, 2, DType::kInt64});
  }
  communicator.all_gather({&own, 2, DType::kInt64}, outputs, deadline);
  for (std::size_t peer = 1; peer < places.size(); ++peer) {
    if (places[peer].layout != places[0].layout) {
      throw MismatchedCollective("rank 0 and rank " + std::to_string(peer) +
                                 " prepared models with different parameters; every rank must build the same model");
    }
  }
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer != group_->rank()) {
      const auto id = static_cast<std::uint32_t>(places[static_cast<std::size_t>(peer)].segment);
      segments_[static_cast<std::size_t>(peer)] = group_->peer_segment(peer, id, deadline);
    }
  }
  identity_ = places[0].segment << 32;
  communicator.barrier(deadline);  // nobody may drop a segment that a peer has yet to map
  interruptions_ = group_->interruptions();
}

MemoryView ShmGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = buckets_.at(index);
  return {base(group_->rank()) + bucket.data_offset, bucket.spec.count, bucket.spec.dtype};
}

ShmGradientExchange::RoundHeader& ShmGradientExchange::header(int rank, std::uint64_t round) const {
  return reinterpret_cast<RoundHeader*>(base(rank) + headers_offset_)[round & 1];
}

amp::GradientStatistics* ShmGradientExchange::statistics(int rank, std::size_t index, std::uint64_t round) const {
  return reinterpret_cast<amp::GradientStatistics*>(base(rank) + statistics_offset_) + slot_place(index, round);
}

std::uint8_t* ShmGradientExchange::used(int rank, std::size_t index, std::uint64_t round) const {
  return reinterpret_cast<std::uint8_t*>(base(rank) + used_offset_) + slot_place(index, round);
}

void ShmGradientExchange::begin(const RoundOptions& options, Deadline deadline) {
  group_->check_usable([](const char* text) { return std::string(text); }, "gradient averaging");
  if (const std::uint64_t interruptions = group_->interruptions(); interruptions != interruptions_) {
    group_->await_interruptions(deadline);  // then no rank writes into the buckets for the sake of an older round
    round_ += interruptions - std::exchange(interruptions_, interruptions);
    for (Bucket& bucket : buckets_) {
      bucket.reduced = false;
    }
  }
  set_options(options);
}

void ShmGradientExchange::set_options(const RoundOptions& options) {
  RoundHeader& own = header(group_->rank(), round_);
  own.weight = options.weight ? checked_weight(*options.weight) : 1.0;
  own.measures = options.measures ? 1 : 0;
  options_ = options;
  if (options.measures && num_slots_ > 0) {
    std::fill_n(statistics(group_->rank(), 0, round_), num_slots_, amp::GradientStatistics());
  }
}

std::optional<amp::GradientStatistics> ShmGradientExchange::statistics(std::size_t index, std::size_t slot) const {
  check_slot(index, slot);
  amp::GradientStatistics all;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (header(rank, finished_).measures == 0) {
      return std::nullopt;
    }
    all += statistics(rank, index, finished_)[slot];
  }
  return all;
}

std::uint8_t* ShmGradientExchange::used_slots(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size(), "bucket " + std::to_string(index));
  return used(group_->rank(), index, round_);
}

void ShmGradientExchange::check_slot(std::size_t index, std::size_t slot) const {
  ACCELERATE_CHECK(index < buckets_.size() && slot < buckets_[index].spec.slots.size(), "slot " + std::to_string(slot));
}

bool ShmGradientExchange::used_anywhere(std::size_t index, std::size_t slot) const {
  check_slot(index, slot);
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (used(rank, index, finished_)[slot] != 0) {
      return true;
    }
  }
  return false;
}

void ShmGradientExchange::publish(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size() && ready(group_->rank(), index).load(std::memory_order_relaxed) < round_,
                   "bucket " + std::to_string(index) + " is published once per round");
  ready(group_->rank(), index).store(round_, std::memory_order_release);
  group_->own().event.notify();
}

bool ShmGradientExchange::ready_everywhere(std::size_t index) const {
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (ready(rank, index).load(std::memory_order_acquire) < round_) {
      return false;
    }
  }
  return true;
}

double ShmGradientExchange::sum_of_weights() const {
  double sum = 0.0;
  for (int rank = 0; rank < group_->size(); ++rank) {
    sum += header(rank, round_).weight;
  }
  return sum;
}

void ShmGradientExchange::reduce_elements(const Bucket& bucket, std::size_t begin, std::size_t count, double scale) {
  const std::size_t offset = bucket.data_offset + begin * element_size(bucket.spec.dtype);
  for (int rank = 0; rank < group_->size(); ++rank) {
    places_[static_cast<std::size_t>(rank)] = base(rank) + offset;
  }
  reduce(bucket.spec.dtype, ReduceOp::kAvg,
         {places_.data(), group_->size(), places_.data(), group_->size(), count, scale});
}

void ShmGradientExchange::reduce_and_measure(std::size_t index, std::size_t begin, std::size_t end, double scale) {
  const Bucket& bucket = buckets_[index];
  const std::size_t step = kMeasuredBytes / element_size(bucket.spec.dtype);
  const MemoryView averages = this->bucket(index);
  amp::GradientStatistics* const statistics = this->statistics(group_->rank(), index, round_);
  for (std::size_t slot = 0; slot < bucket.spec.slots.size(); ++slot) {
    const SlotSpan& span = bucket.spec.slots[slot];
    const std::size_t slot_end = std::min(end, span.offset + span.count);
    for (std::size_t from = std::max(begin, span.offset); from < slot_end; from += step) {
      const std::size_t count = std::min(step, slot_end - from);
      reduce_elements(bucket, from, count, scale);
      statistics[slot] += amp::measure_gradient(within(averages, from, count));
    }
  }
}

void ShmGradientExchange::reduce_slice(std::size_t index) {
  Bucket& bucket = buckets_[index];
  const Slices slices(bucket.spec.count, element_size(bucket.spec.dtype), group_->size());
  const std::size_t begin = slices.begin(group_->rank());
  const std::size_t count = slices.count(group_->rank());
  const double scale = inverse(sum_of_weights());
  if (options_.measures) {
    reduce_and_measure(index, begin, begin + count, scale);
  } else {
    reduce_elements(bucket, begin, count, scale);
  }
  bucket.reduced = true;
}

void ShmGradientExchange::progress() {
  group_->try_between_operations([&] {
    if (group_->interruptions() == interruptions_) {
      reduce_ready();
    }
  });
}

void ShmGradientExchange::reduce_ready() {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    if (!buckets_[index].reduced && ready_everywhere(index)) {
      reduce_slice(index);
    }
  }
}

void ShmGradientExchange::finish(Deadline deadline) {
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    ACCELERATE_CHECK(ready(group_->rank(), index).load(std::memory_order_relaxed) == round_,
                     "bucket " + std::to_string(index) + " is published before finish()");
  }
  Operation operation{OperationKind::kGradients};
  operation.reduce_op = options_.weight ? ReduceOp::kPreMulSum : ReduceOp::kAvg;
  operation.count = buckets_.size();
  operation.round = identity_ + round_;
  group_->run(operation, deadline, [&] {
    group_->announce();
    group_->set_may_withdraw(true);
    reduce_ready();
    group_->await_announcements(deadline);
    for (std::size_t index = 0; index < buckets_.size(); ++index) {
      for (int peer = 0; peer < group_->size(); ++peer) {
        group_->wait(peer, deadline, [&] { return ready(peer, index).load(std::memory_order_acquire) >= round_; });
      }
      if (!buckets_[index].reduced) {
        reduce_slice(index);
      }
    }
    group_->set_may_withdraw(false);
    done(group_->rank()).store(round_, std::memory_order_release);
    group_->own().event.notify();
    for (int peer = 0; peer < group_->size(); ++peer) {
      group_->wait(peer, deadline, [&] { return done(peer).load(std::memory_order_acquire) >= round_; });
    }
  });
  for (Bucket& bucket : buckets_) {
    bucket.reduced = false;
  }
  divisor_ = sum_of_weights();
  finished_ = round_++;
  set_options({});
}

}  // namespace accelerate_cpp::comm
