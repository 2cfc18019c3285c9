// Gradient buckets in shared memory, averaged in place by all ranks together.
//
// Every rank's buckets lie in one segment of its arena, at equal offsets:
//
//   0     ready[num_buckets]   8 bytes each: the last round for which the owner has published the bucket
//   ...   done                 8 bytes: the last round in which the owner has reduced all its slices
//   ...   round                2 x RoundHeader, by parity of the round
//   ...   statistics[slots]    2 x 16 bytes each, by parity of the round: of the owner's slices of the averages
//   ...   used[slots]          2 x 1 byte each, by parity of the round
//   ...   buckets              each aligned to 64 bytes
//
// Bucket b is divided into one slice per rank. Once every rank has published b for a round, rank r reads slice r of all
// ranks' b, averages it and stores it into all ranks' b. No other rank touches slice r, and a rank leaves finish() only
// when all ranks are done. Then its buckets are its own again, without a further barrier. What is stored twice, by
// parity, may be read until the owner begins the round after the next, which it does only when all ranks are done with
// this one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/shm/group.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/grad/gradient_exchange.h"
#include "core/grad/segments_of_ranks.h"

namespace accelerate_cpp::grad {

class ShmGradientExchange final : public GradientExchange {
 public:
  // Collective over the ranks of `communicator`.
  ShmGradientExchange(comm::ShmCommunicator& communicator, std::vector<BucketSpec> specs, Deadline deadline);
  void progress() override;

 private:
  struct Place {
    std::size_t data_offset;
    bool reduced = false;  // this rank has reduced its slice in this round
  };
  using Counter = std::atomic<std::uint64_t>;
  // Written before the first bucket of the round is published.
  struct RoundHeader {
    double weight;
    std::uint64_t measures;
  };

  std::byte* base(int rank) const { return segments_->base(rank); }
  Counter& ready(int rank, std::size_t index) const { return reinterpret_cast<Counter*>(base(rank))[index]; }
  Counter& done(int rank) const { return reinterpret_cast<Counter*>(base(rank))[buckets().size()]; }
  std::size_t num_slots() const { return first_slot(buckets().size()); }
  // The place of the bucket's first slot in an array that has every slot twice, by parity of the round.
  std::size_t slot_place(std::size_t index, std::uint64_t round) const {
    return (round & 1) * num_slots() + first_slot(index);
  }
  RoundHeader& header(int rank, std::uint64_t round) const;
  // Those of the first slot of the bucket; the others follow.
  amp::GradientStatistics* statistics(int rank, std::size_t index, std::uint64_t round) const;
  std::uint8_t* used(int rank, std::size_t index, std::uint64_t round) const;
  void* memory(std::size_t index) override { return base(group_->rank()) + places_[index].data_offset; }
  void start_round(Deadline deadline) override;
  void reset_round() override;
  void hand_over(std::size_t index) override;
  double complete(MemoryView used, Deadline deadline) override;
  std::optional<amp::GradientStatistics> measured(std::size_t index, std::size_t slot) const override;
  amp::GradientStatistics measured_alike(std::size_t index, std::size_t slot, ConstMemoryView gradient) const override;
  void write_header();
  bool ready_everywhere(std::size_t index) const;
  double sum_of_weights() const;
  // Averages `count` elements of the bucket from `begin` on.
  void reduce_elements(std::size_t index, std::size_t begin, std::size_t count, double scale);
  void reduce_and_measure(std::size_t index, double scale);
  // Calls action(slot, first, count) for the pieces of the slice of `rank`, in the order in which they are measured.
  template <class Action>
  void for_each_measured_piece(std::size_t index, int rank, const Action& action) const;
  void reduce_slice(std::size_t index);
  // Reduces its slices of the buckets that all ranks have published.
  void reduce_ready();

  std::shared_ptr<comm::Group> group_;
  std::vector<Place> places_;  // by bucket
  std::size_t headers_offset_ = 0;
  std::size_t statistics_offset_ = 0;
  std::size_t used_offset_ = 0;
  std::unique_ptr<SegmentsOfRanks> segments_;
  std::vector<void*> operands_;  // where the ranks have what is being reduced
  // The next round; skips one for each interruption of the group, so that ranks agree on it whether they had begun the
  // interrupted round or not.
  std::uint64_t round_ = 1;
  std::uint64_t finished_ = 0;       // the last round that was finished
  std::uint64_t interruptions_ = 0;  // of the group, until the last round began
};

}  // namespace accelerate_cpp::grad
