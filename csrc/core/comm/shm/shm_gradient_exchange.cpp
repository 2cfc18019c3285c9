#include "core/comm/shm/shm_gradient_exchange.h"

#include "core/base/check.h"
#include "core/base/round_up.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {
namespace {

// A fingerprint of the bucket layout, so that ranks with different models are told apart before they exchange anything.
std::uint64_t fingerprint(const std::vector<BucketSpec>& buckets) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const BucketSpec& spec : buckets) {
    mix(static_cast<std::uint64_t>(spec.dtype));
    mix(spec.count);
    mix(spec.num_slots);
  }
  return hash;
}

}  // namespace

ShmGradientExchange::ShmGradientExchange(ShmCommunicator& communicator, std::shared_ptr<Group> group,
                                         const std::vector<BucketSpec>& buckets, Deadline deadline)
    : group_(std::move(group)), segments_(static_cast<std::size_t>(group_->size())) {
  std::size_t offset = (buckets.size() + 1) * sizeof(Counter);
  for (const BucketSpec& spec : buckets) {
    buckets_.push_back({spec, 0, offset});
    offset += 2 * spec.num_slots;
  }
  for (Bucket& bucket : buckets_) {
    bucket.data_offset = round_up(offset, 64);
    offset = bucket.data_offset + bucket.spec.count * element_size(bucket.spec.dtype);
  }
  block_ = std::make_unique<OwnedBlock>(group_->arena(), offset);
  segments_[static_cast<std::size_t>(group_->rank())] = block_->segment();

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
}

MemoryView ShmGradientExchange::bucket(std::size_t index) {
  const Bucket& bucket = buckets_.at(index);
  return {base(group_->rank()) + bucket.data_offset, bucket.spec.count, bucket.spec.dtype};
}

std::uint8_t* ShmGradientExchange::used(int rank, std::size_t index, std::uint64_t round) const {
  const Bucket& bucket = buckets_[index];
  return reinterpret_cast<std::uint8_t*>(base(rank)) + bucket.used_offset + (round & 1) * bucket.spec.num_slots;
}

std::uint8_t* ShmGradientExchange::used_slots(std::size_t index) {
  ACCELERATE_CHECK(index < buckets_.size(), "bucket " + std::to_string(index));
  return used(group_->rank(), index, round_);
}

bool ShmGradientExchange::used_anywhere(std::size_t index, std::size_t slot) const {
  ACCELERATE_CHECK(index < buckets_.size() && slot < buckets_[index].spec.num_slots, "slot " + std::to_string(slot));
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (used(rank, index, round_ - 1)[slot] != 0) {
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

void ShmGradientExchange::reduce_slice(std::size_t index) {
  Bucket& bucket = buckets_[index];
  const std::size_t element = element_size(bucket.spec.dtype);
  const Slices slices(bucket.spec.count, element, group_->size());
  const std::size_t begin = bucket.data_offset + slices.begin(group_->rank()) * element;
  std::vector<void*> places;
  for (int rank = 0; rank < group_->size(); ++rank) {
    places.push_back(base(rank) + begin);
  }
  reduce(bucket.spec.dtype, ReduceOp::kAvg,
         {places.data(), group_->size(), places.data(), group_->size(), slices.count(group_->rank()),
          reduction_scale(ReduceOp::kAvg, group_->size())});
  bucket.reduced = true;
}

void ShmGradientExchange::progress() {
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
  operation.count = buckets_.size();
  operation.round = identity_ + round_;
  group_->run(operation, deadline, [&] {
    group_->announce();
    progress();
    group_->await_announcements(deadline);
    for (std::size_t index = 0; index < buckets_.size(); ++index) {
      for (int peer = 0; peer < group_->size(); ++peer) {
        group_->wait(peer, deadline, [&] { return ready(peer, index).load(std::memory_order_acquire) >= round_; });
      }
      if (!buckets_[index].reduced) {
        reduce_slice(index);
      }
    }
    done(group_->rank()).store(round_, std::memory_order_release);
    group_->own().event.notify();
    for (int peer = 0; peer < group_->size(); ++peer) {
      group_->wait(peer, deadline, [&] { return done(peer).load(std::memory_order_acquire) >= round_; });
    }
  });
  for (Bucket& bucket : buckets_) {
    bucket.reduced = false;
  }
  ++round_;
}

}  // namespace accelerate_cpp::comm
