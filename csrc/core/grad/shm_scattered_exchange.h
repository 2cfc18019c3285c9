// Scattered gradients in shared memory: each rank reads its block of what all ranks have published, and writes the
// averages right where they belong.
//
// Every rank has one segment in its arena:
//
//   0     published        8 bytes: how many buckets the owner has published
//   64    reduced          8 bytes: of how many buckets the owner has reduced its block
//   72    done             8 bytes: the last round in which the owner has reduced all its blocks
//   128   used[num_flags]  2 x 1 byte each, by parity of the round
//   ...   ring             kPlaces places, each as large as the largest bucket, aligned to 64 bytes
//
// Both counts go on from round to round: of round n they are between n * num_buckets and (n + 1) * num_buckets. Bucket
// b lies in place b % kPlaces, and is filled when every rank has reduced its block of the bucket that lay there. A rank
// leaves finish() only when all ranks are done.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/comm/shm/group.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/work_queue.h"
#include "core/grad/scattered_exchange.h"
#include "core/grad/segments_of_ranks.h"

namespace accelerate_cpp::grad {

class ShmScatteredExchange final : public ScatteredExchange {
 public:
  static constexpr std::size_t kPlaces = 2;

  // Collective over the ranks of `communicator`, which all give as many flags to finish(). Operations wait for those
  // that were issued in `queue` before, if there is one.
  ShmScatteredExchange(comm::ShmCommunicator& communicator, std::shared_ptr<comm::WorkQueue> queue,
                       std::vector<ScatteredBucket> buckets, std::size_t num_flags, Deadline deadline);
  void progress() override;

 private:
  using Counter = std::atomic<std::uint64_t>;
  class Wait;

  std::byte* base(int rank) const { return segments_->base(rank); }
  Counter& published(int rank) const { return *reinterpret_cast<Counter*>(base(rank)); }
  Counter& reduced(int rank) const { return *reinterpret_cast<Counter*>(base(rank) + 64); }
  Counter& done(int rank) const { return *reinterpret_cast<Counter*>(base(rank) + 72); }
  std::uint8_t* used(int rank) const;
  std::size_t place_offset(std::size_t index) const { return ring_offset_ + index % kPlaces * place_bytes_; }
  // What the counts of a rank are when it has done with the bucket.
  std::uint64_t count_after(std::size_t index) const { return round_ * buckets().size() + index + 1; }
  bool everywhere(Counter& (ShmScatteredExchange::*counter)(int) const, std::size_t index) const;
  comm::Operation operation() const;
  void wait_for_turn() const;
  void check_not_interrupted() const;
  void start_round(Deadline deadline) override;
  void* free_memory(std::size_t index, Deadline deadline) override;
  void hand_over(std::size_t index) override;
  void complete(MemoryView used, Deadline deadline) override;
  void await_free(std::size_t index, Deadline deadline);
  void reduce_next();
  // Reduces its blocks of the buckets that all ranks have published.
  void reduce_ready();

  std::shared_ptr<comm::Group> group_;
  const std::shared_ptr<comm::WorkQueue> queue_;
  const std::size_t num_flags_;
  std::size_t ring_offset_ = 0;
  std::size_t place_bytes_ = 0;
  std::unique_ptr<SegmentsOfRanks> segments_;
  std::vector<const void*> sources_;  // where the ranks have what is being reduced
  // The next round, or the one that has begun; skips one for each interruption of the group, so that ranks agree on it
  // whether they had begun the interrupted round or not.
  std::uint64_t round_ = 1;
  std::size_t num_published_ = 0;  // by this rank in this round
  std::size_t num_reduced_ = 0;
  std::uint64_t interruptions_ = 0;  // of the group, until the last round began
};

}  // namespace accelerate_cpp::grad
