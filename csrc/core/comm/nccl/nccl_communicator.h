// Collectives of GPUs through NVIDIA's NCCL, which is opened at run time.
//
// Operands are memory of this rank's GPU. Calls return when the GPU has finished, so that all work that is given to it
// afterwards, on whatever stream, sees the result.
//
// What NCCL lacks, and what becomes of it here:
// - Reductions of int16, bitwise ones and xor of booleans raise InvalidArgument; int16 is copied like any type.
// - Receives from any source raise InvalidArgument. Tags work in any order. A send ends when its message was received.
//   The first message between two ranks, in each direction, makes an NCCL communicator for them; each message costs a
//   header of its own. Transfers advance only during calls of this communicator and of its transfers.
// - NCCL hangs when the ranks call different things, and some contradictions (sum against max, say) it does not notice
// at
//   all. Therefore, unless NcclOptions::check_calls is off, the ranks compare 16 bytes each after every operation: one
//   more small all-gather and two small copies on the same stream, without another wait of the host. A contradiction
//   that NCCL survives raises MismatchedCollective on every rank, and the communicator stays usable; the operands then
//   hold anything. One that hangs, or lasts, is found through the store after NcclOptions::stall_after, at no cost
//   while nothing hangs; it raises MismatchedCollective on every rank and ends the communicator.
// - A rank that dies without a word may look like one that is late: its peers raise Timeout at their deadlines, unless
// NCCL
//   itself notices.
//
// Several NCCL communicators that work at once on one GPU need room on it side by side: a program that splits groups
// and runs their collectives from several threads must give each GPU their operations in the same order.
//
// The destructor waits up to ten seconds for the other ranks of this host to destroy theirs. After fork() only the
// parent can use it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/nccl/nccl_group.h"
#include "core/comm/nccl/nccl_point_to_point.h"
#include "core/comm/nccl/nccl_session.h"
#include "core/comm/nccl/nccl_types.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class NcclCommunicator final : public Communicator {
 public:
  // Collective over the `size` ranks that share `store`, each with a GPU of its own. The store is used as long as the
  // communicator lives. Throws SystemFailure when a library is missing or too old.
  static std::shared_ptr<NcclCommunicator> connect(std::shared_ptr<Store> store, int rank, int size,
                                                   const NcclOptions& options, Deadline deadline);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

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
  // Memory of this rank's GPU. Dropping it waits for all work on that GPU, as cudaFree does.
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  // By a copy on the GPU.
  void all_reduce_on_host(MemoryView data, ReduceOp op, const Call& call) override;
  // Writes one key into the store. Operations under way are stopped by the threads that wait for them.
  void abort(const std::string& reason) noexcept override;

 private:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, std::unique_ptr<NcclLink> link);

  using ReductionBody =
      std::function<NcclResult(const NcclApi& api, NcclDataType type, NcclRedOp op, NcclComm comm, CudaStream stream)>;

  CallRecord record(CallKind kind, ConstMemoryView operand, int root = -1) const;
  // For operations whose sizes differ between ranks: with places for them, all 0.
  CallRecord sized_record(CallKind kind, ConstMemoryView operand, int root = -1) const;

  // All of these within an operation.
  void issue_reduction(const char* call, DType dtype, const Reduction& reduction, const ReductionBody& body);
  void reduce_each(const std::vector<ConstMemoryView>& inputs, MemoryView output, const Reduction& reduction);
  // The parts, equally large, one after the other in the workspace.
  const std::byte* gathered_copy(const std::vector<ConstMemoryView>& parts);
  void all_gather_equal(ConstMemoryView input, const std::vector<MemoryView>& outputs);
  // inputs[r] goes to rank r, outputs[r] comes from it; what a rank gives to itself is copied.
  void exchange(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs);

  std::shared_ptr<NcclGroup> group_;
  NcclSession session_;
  std::shared_ptr<NcclPointToPoint> transfers_;
  GrowingMemory host_copy_;  // of operands of the host
  GrowingMemory device_copy_;
};

}  // namespace accelerate_cpp::comm
