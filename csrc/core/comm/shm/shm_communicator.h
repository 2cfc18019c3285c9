// A communicator over the shared memory of one host.
//
// Small operands go through a staging slot in one step: every rank copies in, announces, and reads what it needs. Large
// ones go through the staging slots in pieces, so that copying and reducing overlap in cache. Operands that lie in
// shared memory on every rank are worked on where they are. Sums are taken in rank order: bitwise equal on all ranks
// and runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/shm/block_collective.h"
#include "core/comm/shm/group.h"
#include "core/comm/shm/point_to_point.h"
#include "core/comm/shm/staging.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class ShmCommunicator final : public Communicator {
 public:
  // Collective over the `size` ranks that share `store`. All of them must run on this host.
  static std::shared_ptr<ShmCommunicator> connect(Store& store, int rank, int size, Deadline deadline, WaitHooks hooks);

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  void all_reduce(MemoryView data, Reduction reduction, const Call& call) override;
  void reduce(MemoryView data, int root, Reduction reduction, const Call& call) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                      const Call& call) override;
  void broadcast(MemoryView data, int root, const Call& call) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) override;
  void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                  const Call& call) override;
  void barrier(const Call& call) override;
  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Communicator> split(int color, int key, const Call& call) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  std::shared_ptr<Buffer> window(std::size_t size_bytes, const Call& call) override;
  std::string name_of(int rank) const override { return group_->hooks().name_of(rank); }
  double cores_per_rank() const override { return group_->cores() / size(); }
  void leave() noexcept override;
  bool someone_has_left() override { return group_->someone_has_left(); }
  std::uint64_t interruptions() const noexcept override { return group_->interruptions(); }
  void withdraw(const std::string& reason, const Call& call) override { group_->withdraw(reason, call); }
  bool can_withdraw() const override { return true; }
  std::vector<int> meet(const std::string& topic, const Call& call) override { return group_->meet(topic, call); }
  void abort(const std::string& reason) noexcept override;
  // The group whose memory it uses. Other users of the group act between its operations.
  const std::shared_ptr<Group>& group() const { return group_; }

 private:
  explicit ShmCommunicator(std::shared_ptr<Group> group);

  bool announced_in_arena(bool wanted) const;
  // What all ranks have announced as the factors of a pre-multiplied sum; null for other reductions.
  const double* factors(const Reduction& reduction);
  void reduce_small(MemoryView data, const Reduction& reduction);
  void reduce_in_arena(MemoryView data, const Reduction& reduction, const Deadline& deadline);
  Operation describe_gather(CallKind kind, ConstMemoryView one, int root) const;
  std::vector<bool> takers(bool all, int root) const;
  // The same number for ranks for which `takes` is set, 0 for the others.
  std::vector<std::uint64_t> counts(const std::vector<bool>& takes, std::uint64_t count) const;

  std::shared_ptr<Group> group_;
  Staging staging_;
  std::shared_ptr<PointToPoint> point_to_point_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  std::vector<double> factors_;
};

}  // namespace accelerate_cpp::comm
