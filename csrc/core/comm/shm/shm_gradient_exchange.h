// Gradient buckets in shared memory, averaged in place by all ranks together.
//
// Every rank's buckets lie in one segment of its arena, at equal offsets:
//
//   0     ready[num_buckets]   8 bytes each: the last round for which the owner has published the bucket
//   ...   done                 8 bytes: the last round in which the owner has reduced all its slices
//   ...   used[num_slots]      2 x 1 byte each, by parity of the round
//   ...   buckets              each aligned to 64 bytes
//
// Bucket b is divided into one slice per rank. Once every rank has published b for a round, rank r reads slice r of all
// ranks' b, averages it and stores it into all ranks' b. No other rank touches slice r, and a rank leaves finish() only
// when all ranks are done; so its buckets are its own again then, and no further barrier is needed.
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
  void publish(std::size_t index) override;
  void progress() override;
  void finish(Deadline deadline) override;

 private:
  struct Bucket {
    BucketSpec spec;
    std::size_t data_offset;
    std::size_t used_offset;
    bool reduced = false;  // this rank has reduced its slice in this round
  };
  using Counter = std::atomic<std::uint64_t>;

  std::byte* base(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  Counter& ready(int rank, std::size_t index) const { return reinterpret_cast<Counter*>(base(rank))[index]; }
  Counter& done(int rank) const { return reinterpret_cast<Counter*>(base(rank))[buckets_.size()]; }
  std::uint8_t* used(int rank, std::size_t index, std::uint64_t round) const;
  bool ready_everywhere(std::size_t index) const;
  void reduce_slice(std::size_t index);

  std::shared_ptr<Group> group_;
  std::vector<Bucket> buckets_;
  std::unique_ptr<OwnedBlock> block_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::uint64_t identity_ = 0;  // distinguishes this exchange from others of the group
  std::uint64_t round_ = 1;
};

}  // namespace accelerate_cpp::comm
