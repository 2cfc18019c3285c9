// Runs the collectives of an NcclCommunicator one after the other, each from the order in which the caller's stream
// prepared its operands to the moment when the GPU has finished it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/comm/call_record.h"
#include "core/comm/nccl/call_watch.h"
#include "core/comm/nccl/cuda_objects.h"
#include "core/comm/nccl/nccl_group.h"
#include "core/comm/nccl/nccl_link.h"

namespace accelerate_cpp::comm {

class NcclSession {
 public:
  // Of the ranks joined by `link`, which has settled.
  NcclSession(std::shared_ptr<NcclGroup> group, std::unique_ptr<NcclLink> link);

  // Tells the other ranks that this one has left.
  ~NcclSession();
  NcclSession(const NcclSession&) = delete;
  NcclSession& operator=(const NcclSession&) = delete;

  // Joins the `size` ranks that share the group's store. Throws Timeout when some are missing.
  static std::unique_ptr<NcclLink> join(const NcclContext& context, GroupBoard& board, int rank, int size,
                                        Deadline deadline, const WaitHooks& hooks);

  // Runs `body`, which calls the methods below, as one operation: alone in this process, refused once the group has
  // failed, on the communicator's device. An exception within it ends the group on all ranks, but for the mismatch that
  // the comparison of calls finds after the operation.
  void run(CallRecord record, const Call& call, const std::function<void()>& body);

  // Called while an operation waits, in between two looks at the GPU: keeps point-to-point transfers going.
  void set_meanwhile(std::function<void()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  // Within run() only. issue() returns when NCCL has put the work onto the stream.
  void issue(const char* call, const NcclLink::Body& body);
  void copy(void* destination, const void* source, std::size_t size_bytes);
  // Work that uses an operation made for `factor`, one element of `type`.
  void issue_premul_sum(const char* call, NcclDataType type, void* factor,
                        const std::function<NcclResult(const NcclApi&, NcclRedOp, NcclComm, CudaStream)>& body);
  // Device memory until the end of the operation.
  std::byte* workspace(std::size_t size_bytes) { return workspace_.at_least(size_bytes); }
  // The link of the ranks with the same color, settled; null for a negative color.
  std::unique_ptr<NcclLink> split(int color, int key);
  // The number of the operation, from 1.
  std::uint64_t sequence() const { return sequence_; }
  // Whether run() lets all ranks meet at the end of the operation by itself.
  bool meets_anyway() const { return group_->options().check_calls; }

 private:
  void order_after_caller();
  void exchange_digests(const CallRecord& record);
  void await_end();
  template <class Done>
  void wait_until(const Done& done);
  void end_group(bool is_mismatch, const std::string& text) noexcept;

  std::shared_ptr<NcclGroup> group_;
  std::unique_ptr<NcclLink> link_;
  DeviceEvent caller_;
  GrowingMemory workspace_;
  CudaMemory device_digests_;
  CudaMemory digests_;
  std::function<void()> meanwhile_ = [] {};
  std::mutex mutex_;
  CallWatch* watch_ = nullptr;  // of the operation that runs
  std::uint64_t sequence_ = 0;
};

}  // namespace accelerate_cpp::comm
