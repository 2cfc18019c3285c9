// A communicator over the shared memory of one host.
//
// Small operands go through a staging slot in one step: every rank copies in, announces, and reads what it needs. Large
// ones go through the staging slots in pieces, so that copying and reducing overlap in cache. Operands that lie in the
// arena on every rank are worked on where they are. Sums are taken in rank order: bitwise equal on all ranks and runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/staging.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class ShmCommunicator final : public Communicator {
 public:
  // Collective over the `size` ranks that share `store`. All of them must run on this host. `probe` may be empty.
  static std::shared_ptr<ShmCommunicator> connect(Store& store, int rank, int size, Deadline deadline,
                                                  InterruptProbe probe);

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  void all_reduce(MemoryView data, ReduceOp op, Deadline deadline) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, ReduceOp op,
                      Deadline deadline) override;
  void broadcast(MemoryView data, int root, Deadline deadline) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, Deadline deadline) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, Deadline deadline) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, Deadline deadline) override;
  void barrier(Deadline deadline) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  std::unique_ptr<GradientExchange> gradient_exchange(const std::vector<BucketSpec>& buckets,
                                                      Deadline deadline) override;
  void abort(const std::string& reason) noexcept override;

 private:
  // One operation in which every rank offers blocks of bytes and reads some of the others'.
  struct Exchange {
    Operation operation;
    std::vector<const std::byte*> put;  // what this rank offers: nothing, one block for all, or one block per rank
    int num_blocks;                     // 1 or size(): how many blocks a rank that offers something offers
    std::size_t block_bytes;
    int first_source;  // this rank reads from ranks first_source to last_source; from nobody when first > last
    int last_source;
    bool in_arena;  // every rank that offers something does so in its arena
    // Takes bytes [begin, begin + length) of the blocks; sources[r] points at that range of rank r's block for this
    // rank.
    std::function<void(const void* const* sources, std::size_t begin, std::size_t length)> consume;
  };

  explicit ShmCommunicator(std::shared_ptr<Group> group) : group_(std::move(group)), staging_(*group_) {}

  // The operation with the place of `data` in the arena filled in, if it has one.
  Operation at(Operation operation, const void* data, std::size_t size_bytes) const;
  // Whether ranks `first` to `last` have announced operands in their arenas.
  bool announced_in_arena(int first, int last) const;
  // The operand that `peer` has announced, in this process's mapping.
  std::byte* peer_operand(int peer, const Deadline& deadline);

  void all_reduce_in_arena(MemoryView data, ReduceOp op, const Deadline& deadline);

  void run(const Exchange& exchange, const Deadline& deadline);
  void exchange_small(const Exchange& exchange, const Deadline& deadline);
  void exchange_in_arena(const Exchange& exchange, const Deadline& deadline);
  void exchange_staged(const Exchange& exchange, const Deadline& deadline);

  std::shared_ptr<Group> group_;
  Staging staging_;
};

}  // namespace accelerate_cpp::comm
