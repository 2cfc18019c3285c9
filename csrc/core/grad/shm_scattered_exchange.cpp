#include "core/grad/shm_scattered_exchange.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "core/base/check.h"
#include "core/base/round_up.h"
#include "core/comm/fingerprint.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::grad {

using comm::CallKind;
using comm::Fingerprint;
using comm::Group;
using comm::Operation;
using comm::ReduceOp;

namespace {

// Averages that are added to something are processed in pieces of this size, which stay in the first-level cache.
constexpr std::size_t kAddedBytes = std::size_t{8} << 10;

std::uint64_t fingerprint(const std::vector<ScatteredBucket>& buckets, std::size_t num_flags) {
  Fingerprint fingerprint;
  fingerprint.mix(num_flags);
  for (const ScatteredBucket& bucket : buckets) {
    fingerprint.mix(static_cast<std::uint64_t>(bucket.dtype));
    fingerprint.mix(bucket.block);
    fingerprint.mix(bucket.slots.size());
  }
  return fingerprint.value();
}

}  // namespace

// Waits within a round, outside of the operation that ends it. A peer that is in another operation, or has withdrawn,
// ends them as that operation would have ended.
class ShmScatteredExchange::Wait {
 public:
  Wait(Group& group, const Operation& operation, Deadline deadline)
      : group_(group), operation_(operation), deadline_(deadline), number_(group.next_sequence()) {
    group_.set_may_withdraw(true);
  }

  template <class Condition>
  void until(int peer, const Condition& condition) {
    try {
      group_.wait(peer, deadline_, [&] { return condition() || is_elsewhere(peer); });
      if (!condition()) {
        announce();
        group_.await_announcements(deadline_);  // throws
      }
    } catch (...) {
      announce();  // peers see there what has become of this rank
      throw;
    }
  }

 private:
  // Whether the peer is in another operation than the end of this round, or has withdrawn from that.
  bool is_elsewhere(int peer) const {
    const comm::RankControl& control = group_.control(peer);
    return control.announced.load(std::memory_order_acquire) >= number_ &&
           (!operation_.agrees_with(control.operations[number_ & 1]) ||
            control.withdrawals[number_ & 1].is_of(number_));
  }

  void announce() {
    if (!std::exchange(announced_, true)) {
      group_.announce();
    }
  }

  Group& group_;
  const Operation& operation_;
  const Deadline deadline_;
  const std::uint64_t number_;
  bool announced_ = false;
};

ShmScatteredExchange::ShmScatteredExchange(comm::ShmCommunicator& communicator, std::shared_ptr<comm::WorkQueue> queue,
                                           std::vector<ScatteredBucket> buckets, std::size_t num_flags,
                                           Deadline deadline)
    : ScatteredExchange(std::move(buckets), communicator.size()),
      group_(communicator.group()),
      queue_(std::move(queue)),
      num_flags_(num_flags),
      ring_offset_(round_up(128 + 2 * num_flags, 64)),
      sources_(num_ranks()) {
  for (const ScatteredBucket& bucket : this->buckets()) {
    place_bytes_ = std::max(place_bytes_, round_up(size_bytes(bucket), 64));
  }
  segments_ = std::make_unique<SegmentsOfRanks>(communicator, ring_offset_ + kPlaces * place_bytes_,
                                                fingerprint(this->buckets(), num_flags), deadline);
  interruptions_ = group_->interruptions();
}

std::uint8_t* ShmScatteredExchange::used(int rank) const {
  return reinterpret_cast<std::uint8_t*>(base(rank) + 128) + (round_ & 1) * num_flags_;
}

bool ShmScatteredExchange::everywhere(Counter& (ShmScatteredExchange::*counter)(int) const, std::size_t index) const {
  for (int rank = 0; rank < group_->size(); ++rank) {
    if ((this->*counter)(rank).load(std::memory_order_acquire) < count_after(index)) {
      return false;
    }
  }
  return true;
}

Operation ShmScatteredExchange::operation() const {
  Operation operation{{CallKind::kGradients}};
  operation.signature.op = ReduceOp::kAvg;
  operation.signature.count = buckets().size();
  operation.signature.round = segments_->identity() + round_;
  return operation;
}

void ShmScatteredExchange::wait_for_turn() const {
  if (queue_) {
    queue_->drain();
  }
}

void ShmScatteredExchange::check_not_interrupted() const {
  if (group_->interruptions() != interruptions_) {
    throw MismatchedCollective(
        group_->hooks().name_of(group_->rank()) +
        ": an error that all ranks share ended another collective within this backward pass, and the pass with it");
  }
}

void ShmScatteredExchange::start_round(Deadline deadline) {
  group_->check_usable([](CallKind kind) { return comm::name(kind); }, CallKind::kGradients);
  if (const std::uint64_t interruptions = group_->interruptions(); interruptions != interruptions_) {
    group_->await_interruptions(deadline);  // afterwards no rank reads what was published in an older round
    round_ += interruptions - std::exchange(interruptions_, interruptions);
  }
  num_published_ = num_reduced_ = 0;
}

void* ShmScatteredExchange::free_memory(std::size_t index, Deadline deadline) {
  if (index >= kPlaces) {
    await_free(index - kPlaces, deadline);
  }
  return base(group_->rank()) + place_offset(index);
}

void ShmScatteredExchange::await_free(std::size_t index, Deadline deadline) {
  wait_for_turn();
  check_not_interrupted();
  progress();
  if (everywhere(&ShmScatteredExchange::reduced, index)) {
    return;
  }
  const Operation operation = this->operation();
  group_->run(operation, deadline, [&] {
    Wait wait(*group_, operation, deadline);
    for (int peer = 0; peer < group_->size(); ++peer) {
      wait.until(peer, [&] { return published(peer).load(std::memory_order_acquire) >= count_after(index); });
    }
    reduce_ready();
    for (int peer = 0; peer < group_->size(); ++peer) {
      wait.until(peer, [&] { return reduced(peer).load(std::memory_order_acquire) >= count_after(index); });
    }
  });
}

void ShmScatteredExchange::hand_over(std::size_t index) {
  num_published_ = index + 1;
  published(group_->rank()).store(count_after(index), std::memory_order_release);
  group_->own().event.notify();
}

void ShmScatteredExchange::reduce_next() {
  const ScatteredBucket& bucket = buckets()[num_reduced_];
  const std::size_t element_bytes = element_size(bucket.dtype);
  const double scale = 1.0 / static_cast<double>(num_ranks());
  const auto own = static_cast<std::size_t>(group_->rank());
  const auto reduce = [&](std::size_t first, std::size_t count, void* to) {
    const std::size_t offset = place_offset(num_reduced_) + (own * bucket.block + first) * element_bytes;
    for (std::size_t rank = 0; rank < num_ranks(); ++rank) {
      sources_[rank] = base(static_cast<int>(rank)) + offset;
    }
    comm::reduce(bucket.dtype, ReduceOp::kAvg, {sources_.data(), group_->size(), &to, 1, count, scale});
  };
  for (std::size_t slot = 0; slot < bucket.slots.size(); ++slot) {
    const SlotSpan& span = bucket.slots[slot];
    const Share& share = shares(num_reduced_)[slot];
    if (span.count == 0) {
      continue;
    }
    if (!share.adds) {
      reduce(span.offset, span.count, share.data);
      continue;
    }
    // Only this rank reads its own block: the averages replace it there, and are added from there.
    std::byte* const block = base(group_->rank()) + place_offset(num_reduced_) + own * bucket.block * element_bytes;
    const std::size_t step = kAddedBytes / element_bytes;
    for (std::size_t done = 0; done < span.count; done += step) {
      const std::size_t count = std::min(step, span.count - done);
      void* const averages = block + (span.offset + done) * element_bytes;
      void* const to = static_cast<std::byte*>(share.data) + done * element_bytes;
      reduce(span.offset + done, count, averages);
      const std::array<const void*, 2> terms{to, averages};
      comm::reduce(bucket.dtype, ReduceOp::kSum, {terms.data(), 2, &to, 1, count, 1.0});
    }
  }
  reduced(group_->rank()).store(count_after(num_reduced_), std::memory_order_release);
  ++num_reduced_;
  group_->own().event.notify();
}

void ShmScatteredExchange::reduce_ready() {
  while (num_reduced_ < num_published_ && everywhere(&ShmScatteredExchange::published, num_reduced_)) {
    reduce_next();
  }
}

void ShmScatteredExchange::progress() {
  group_->try_between_operations([&] {
    if (group_->interruptions() == interruptions_) {
      reduce_ready();
    }
  });
}

void ShmScatteredExchange::complete(MemoryView used_anywhere, Deadline deadline) {
  ACCELERATE_CHECK(used_anywhere.count == num_flags_, "as many flags as the exchange was made for");
  wait_for_turn();
  auto* const flags = static_cast<std::uint8_t*>(used_anywhere.data);
  std::copy_n(flags, num_flags_, used(group_->rank()));
  group_->run(operation(), deadline, [&] {
    group_->announce();  // all buckets are published: whoever sees this can reduce its blocks of them
    group_->set_may_withdraw(true);
    reduce_ready();
    group_->await_announcements(deadline);
    reduce_ready();
    group_->set_may_withdraw(false);
    done(group_->rank()).store(round_, std::memory_order_release);
    group_->own().event.notify();
    for (int peer = 0; peer < group_->size(); ++peer) {
      group_->wait(peer, deadline, [&] { return done(peer).load(std::memory_order_acquire) >= round_; });
    }
  });
  for (int rank = 0; rank < group_->size(); ++rank) {
    const std::uint8_t* const theirs = used(rank);
    std::transform(flags, flags + num_flags_, theirs, flags, std::bit_or<std::uint8_t>());
  }
  ++round_;
}

}  // namespace accelerate_cpp::grad
