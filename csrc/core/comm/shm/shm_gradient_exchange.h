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
// when all ranks are done; so its buckets are its own again then, and no further barrier is needed. What exists twice
// is read until the owner begins the next round but one, which no rank reaches before all are done with this one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/gradient_exchange.h"
#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {

class ShmCommunicator;

class ShmGradientExchange final : public GradientExchange {
 public:
  // Collective over the ranks of `communicator`, whose group is `group`.
  ShmGradientExchange(ShmCommunicator& communicator, std::shared_ptr<Group> group,
                      const std::vector<BucketSpec>& buckets, Deadline deadline);
  MemoryView bucket(std::size_t index) override;
  std::uint8_t* used_slots(std::size_t index) override;
  bool used_anywhere(std::size_t index, std::size_t slot) const override;
  void begin(const RoundOptions& options, Deadline deadline) override;
  std::optional<amp::GradientStatistics> statistics(std::size_t index, std::size_t slot) const override;
  double divisor() const override { return divisor_; }
  void publish(std::size_t index) override;
  void progress() override;
  void finish(Deadline deadline) override;

 private:
  struct Bucket {
    BucketSpec spec;
    std::size_t data_offset;
    std::size_t first_slot;  // among those of all buckets
    bool reduced = false;    // this rank has reduced its slice in this round
  };
  using Counter = std::atomic<std::uint64_t>;
  // Written before the first bucket of the round is published.
  struct RoundHeader {
    double weight;
    std::uint64_t measures;
  };

  std::byte* base(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  Counter& ready(int rank, std::size_t index) const { return reinterpret_cast<Counter*>(base(rank))[index]; }
  Counter& done(int rank) const { return reinterpret_cast<Counter*>(base(rank))[buckets_.size()]; }
  // Of the first slot of the bucket, among what there is of all slots in two rounds.
  std::size_t slot_place(std::size_t index, std::uint64_t round) const {
    return (round & 1) * num_slots_ + buckets_[index].first_slot;
  }
  RoundHeader& header(int rank, std::uint64_t round) const;
  // Those of the first slot of the bucket; the others follow.
  amp::GradientStatistics* statistics(int rank, std::size_t index, std::uint64_t round) const;
  std::uint8_t* used(int rank, std::size_t index, std::uint64_t round) const;
  void set_options(const RoundOptions& options);
  void check_slot(std::size_t index, std::size_t slot) const;
  bool ready_everywhere(std::size_t index) const;
  double sum_of_weights() const;
  // Averages so many elements of the bucket from `begin` on.
  void reduce_elements(const Bucket& bucket, std::size_t begin, std::size_t count, double scale);
  void reduce_and_measure(std::size_t index, std::size_t begin, std::size_t end, double scale);
  void reduce_slice(std::size_t index);
  // Reduces its slices of the buckets that all ranks have published.
  void reduce_ready();

  std::shared_ptr<Group> group_;
  std::vector<Bucket> buckets_;
  std::size_t num_slots_ = 0;  // of all buckets
  std::size_t headers_offset_ = 0;
  std::size_t statistics_offset_ = 0;
  std::size_t used_offset_ = 0;
  std::unique_ptr<OwnedBlock> block_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<void*> places_;   // where the ranks have what is being reduced
  std::uint64_t identity_ = 0;  // distinguishes this exchange from others of the group
  // The next round; skips one for each interruption of the group, so that ranks agree on it whether they had begun the
  // interrupted round or not.
  std::uint64_t round_ = 1;
  std::uint64_t finished_ = 0;       // the last round that was finished
  std::uint64_t interruptions_ = 0;  // of the group, until the last round began
  RoundOptions options_;             // of this round
  double divisor_ = 1.0;             // of the finished round
};

}  // namespace accelerate_cpp::comm
