// A communicator that is also used through a WorkQueue: every operation waits for those that were issued before it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/work_queue.h"

namespace accelerate_cpp::comm {

class OrderedCommunicator final : public Communicator {
 public:
  // The operations in `queue` work on `inner`.
  OrderedCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<WorkQueue> queue)
      : inner_(std::move(inner)), queue_(std::move(queue)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
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
  double cores_per_rank() const override { return inner_->cores_per_rank(); }
  void leave() noexcept override { inner_->leave(); }
  bool someone_has_left() override { return inner_->someone_has_left(); }
  std::uint64_t interruptions() const noexcept override { return inner_->interruptions(); }
  void withdraw(const std::string& reason, const Call& call) override;
  bool can_withdraw() const override { return inner_->can_withdraw(); }
  std::vector<int> meet(const std::string& topic, const Call& call) override;
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

  // The inner communicator, once everything issued in the queue has ended.
  Communicator& in_turn();
  const std::shared_ptr<WorkQueue>& queue() const { return queue_; }

 private:
  const std::shared_ptr<Communicator> inner_;
  const std::shared_ptr<WorkQueue> queue_;
};

}  // namespace accelerate_cpp::comm
