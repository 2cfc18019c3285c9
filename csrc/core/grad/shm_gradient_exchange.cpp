#include "core/grad/shm_gradient_exchange.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/base/check.h"
#include "core/base/round_up.h"
#include "core/base/view_parts.h"
#include "core/comm/fingerprint.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::grad {

using comm::CallKind;
using comm::Fingerprint;
using comm::Operation;
using comm::ReduceOp;
using comm::Slices;

namespace {

// When averages are measured, they are processed in pieces of this size, which stay in the first-level cache until
// then.
constexpr std::size_t kMeasuredBytes = std::size_t{8} << 10;

// A fingerprint of the bucket layout, so that ranks with different models notice before they share any gradients.
std::uint64_t fingerprint(const std::vector<BucketSpec>& buckets) {
  Fingerprint fingerprint;
  for (const BucketSpec& spec : buckets) {
    fingerprint.mix(static_cast<std::uint64_t>(spec.dtype));
    fingerprint.mix(spec.count);
    fingerprint.mix(spec.slots.size());
  }
  return fingerprint.value();
}

}  // namespace

ShmGradientExchange::ShmGradientExchange(comm::ShmCommunicator& communicator, std::vector<BucketSpec> specs,
                                         Deadline deadline)
    : GradientExchange(std::move(specs)),
      group_(communicator.group()),
      operands_(static_cast<std::size_t>(group_->size())) {
  headers_offset_ = (buckets().size() + 1) * sizeof(Counter);
  statistics_offset_ = headers_offset_ + 2 * sizeof(RoundHeader);
  used_offset_ = statistics_offset_ + 2 * num_slots() * sizeof(amp::GradientStatistics);
  std::size_t offset = used_offset_ + 2 * num_slots();
  for (const BucketSpec& spec : buckets()) {
    places_.push_back({round_up(offset, 64)});
    offset = places_.back().data_offset + spec.count * element_size(spec.dtype);
  }
  segments_ = std::make_unique<SegmentsOfRanks>(communicator, offset, fingerprint(buckets()), deadline);
  write_header();
  interruptions_ = group_->interruptions();
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

void ShmGradientExchange::start_round(Deadline deadline) {
  group_->check_usable([](CallKind kind) { return comm::name(kind); }, CallKind::kGradients);
  if (const std::uint64_t interruptions = group_->interruptions(); interruptions != interruptions_) {
    group_->await_interruptions(deadline);  // afterwards no rank writes into the buckets for an older round
    round_ += interruptions - std::exchange(interruptions_, interruptions);
  }
  reset_round();
}

void ShmGradientExchange::reset_round() {
  for (Place& place : places_) {
    place.reduced = false;
  }
  write_header();
}

void ShmGradientExchange::write_header() {
  header(group_->rank(), round_) = {weight(), options().measures ? std::uint64_t{1} : 0};
  if (options().measures && num_slots() > 0) {
    std::fill_n(statistics(group_->rank(), 0, round_), num_slots(), amp::GradientStatistics());
  }
}

std::optional<amp::GradientStatistics> ShmGradientExchange::measured(std::size_t index, std::size_t slot) const {
  amp::GradientStatistics all;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (header(rank, finished_).measures == 0) {
      return std::nullopt;
    }
    all += statistics(rank, index, finished_)[slot];
  }
  return all;
}

void ShmGradientExchange::hand_over(std::size_t index) {
  std::copy_n(used_slots(index), buckets()[index].slots.size(), used(group_->rank(), index, round_));
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

void ShmGradientExchange::reduce_elements(std::size_t index, std::size_t begin, std::size_t count, double scale) {
  const DType dtype = buckets()[index].dtype;
  const std::size_t offset = places_[index].data_offset + begin * element_size(dtype);
  for (int rank = 0; rank < group_->size(); ++rank) {
    operands_[static_cast<std::size_t>(rank)] = base(rank) + offset;
  }
  comm::reduce(dtype, ReduceOp::kAvg,
               {operands_.data(), group_->size(), operands_.data(), group_->size(), count, scale});
}

template <class Action>
void ShmGradientExchange::for_each_measured_piece(std::size_t index, int rank, const Action& action) const {
  const BucketSpec& spec = buckets()[index];
  const Slices slices(spec.count, element_size(spec.dtype), group_->size());
  const std::size_t begin = slices.begin(rank);
  const std::size_t end = begin + slices.count(rank);
  const std::size_t step = kMeasuredBytes / element_size(spec.dtype);
  for (std::size_t slot = 0; slot < spec.slots.size(); ++slot) {
    const SlotSpan& span = spec.slots[slot];
    const std::size_t slot_end = std::min(end, span.offset + span.count);
    for (std::size_t from = std::max(begin, span.offset); from < slot_end; from += step) {
      action(slot, from, std::min(step, slot_end - from));
    }
  }
}

void ShmGradientExchange::reduce_and_measure(std::size_t index, double scale) {
  const MemoryView averages = bucket(index);
  amp::GradientStatistics* const statistics = this->statistics(group_->rank(), index, round_);
  for_each_measured_piece(index, group_->rank(), [&](std::size_t slot, std::size_t first, std::size_t count) {
    reduce_elements(index, first, count, scale);
    statistics[slot] += amp::measure_gradient(within(averages, first, count));
  });
}

amp::GradientStatistics ShmGradientExchange::measured_alike(std::size_t index, std::size_t slot,
                                                            ConstMemoryView gradient) const {
  const std::size_t offset = buckets()[index].slots[slot].offset;
  amp::GradientStatistics all;
  for (int rank = 0; rank < group_->size(); ++rank) {
    amp::GradientStatistics slice;
    for_each_measured_piece(index, rank, [&](std::size_t piece_slot, std::size_t first, std::size_t count) {
      if (piece_slot == slot) {
        slice += amp::measure_gradient(within(gradient, first - offset, count));
      }
    });
    all += slice;
  }
  return all;
}

void ShmGradientExchange::reduce_slice(std::size_t index) {
  const double scale = inverse(sum_of_weights());
  if (options().measures) {
    reduce_and_measure(index, scale);
  } else {
    const BucketSpec& spec = buckets()[index];
    const Slices slices(spec.count, element_size(spec.dtype), group_->size());
    reduce_elements(index, slices.begin(group_->rank()), slices.count(group_->rank()), scale);
  }
  places_[index].reduced = true;
}

void ShmGradientExchange::progress() {
  group_->try_between_operations([&] {
    if (group_->interruptions() == interruptions_) {
      reduce_ready();
    }
  });
}

void ShmGradientExchange::reduce_ready() {
  for (std::size_t index = 0; index < buckets().size(); ++index) {
    if (!places_[index].reduced && ready_everywhere(index)) {
      reduce_slice(index);
    }
  }
}

double ShmGradientExchange::complete(MemoryView used_anywhere, Deadline deadline) {
  Operation operation{{CallKind::kGradients}};
  operation.signature.op = options().weight ? ReduceOp::kPreMulSum : ReduceOp::kAvg;
  operation.signature.count = buckets().size();
  operation.signature.round = segments_->identity() + round_;
  group_->run(operation, deadline, [&] {
    group_->announce();
    group_->set_may_withdraw(true);
    reduce_ready();
    group_->await_announcements(deadline);
    for (std::size_t index = 0; index < buckets().size(); ++index) {
      for (int peer = 0; peer < group_->size(); ++peer) {
        group_->wait(peer, deadline, [&] { return ready(peer, index).load(std::memory_order_acquire) >= round_; });
      }
      if (!places_[index].reduced) {
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
  auto* const flags = static_cast<std::uint8_t*>(used_anywhere.data);
  for (int rank = 0; num_slots() > 0 && rank < group_->size(); ++rank) {
    const std::uint8_t* const theirs = used(rank, 0, round_);
    std::transform(flags, flags + used_anywhere.count, theirs, flags, std::bit_or<std::uint8_t>());
  }
  const double sum = sum_of_weights();
  finished_ = round_++;
  return sum;
}

}  // namespace accelerate_cpp::grad
