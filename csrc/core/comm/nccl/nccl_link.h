// One NCCL communicator with the stream that its work runs on. Nothing here waits: a caller looks whether a step has
// ended, and in between has the time to look at the deadline, at the user and at the other ranks.
//
// The steps: issue() hands work to NCCL, which may put it onto the stream only later, in a thread of its own; once
// settled() says that it has, more can be issued or copied; mark() then ends a piece of work, which finished() has seen
// the GPU complete.
//
// Not thread-safe; the device must be current. In a forked child the destructor does nothing.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/comm/nccl/cuda_objects.h"
#include "core/comm/nccl/nccl_api.h"

namespace accelerate_cpp::comm {

// The libraries and the device that a communicator works with.
struct NcclContext {
  std::shared_ptr<const NcclApi> api;
  std::shared_ptr<const CudaDevice> device;
};

class NcclLink {
 public:
  // Begins to join the communicator `id` of `size` ranks; settled() says when all have.
  NcclLink(NcclContext context, const NcclUniqueId& id, int rank, int size);

  // Begins to split this one. Once this one has settled, child() is the new link, which has to settle in its turn
  // before it is of use; null for a negative color.
  void split(int color, int key);
  std::unique_ptr<NcclLink> child();

  // Ends the communicator. When it is healthy and idle this is done in order: NCCL brings what this rank has sent to
  // the others, and waits up to ten seconds for those of this host to end theirs. Else as abort() does.
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // Of a child: known once it has settled.
  int rank() const { return rank_; }
  int size() const { return size_; }
  DeviceStream& stream() { return stream_; }
  const NcclContext& context() const { return context_; }

  // What is issued from now on waits until `event` has passed.
  void wait_for(const DeviceEvent& event) { event.hold_back(stream_.get()); }

  // Hands over what `body` asks of NCCL as one group. `body` may not throw.
  using Body = std::function<NcclResult(const NcclApi& api, NcclComm comm, CudaStream stream)>;
  void issue(const char* call, const Body& body);

  // Throws as NcclApi::check() when NCCL reports an error, also one of another rank that it noticed by itself.
  bool settled();
  void mark() { mark_.record(stream_.get()); }
  bool finished();

  // An operation for a pre-multiplied sum, valid while this link lives; release it when the work that uses it has
  // settled.
  NcclRedOp make_premul_sum(NcclDataType type, void* factor);
  void release(NcclRedOp op);

  // Begins to end it, so that several can be ended at once; nothing else may follow but the destructor. Never throws.
  void retire() noexcept;

  // Stops what is under way, also on the GPU, and returns when the GPU no longer touches the operands (or has not let
  // go of them for five seconds). The link is of no use afterwards. Never throws.
  void abort() noexcept;

 private:
  NcclLink(NcclContext context, NcclComm comm);

  bool end_in_order() noexcept;

  NcclContext context_;
  DeviceStream stream_;
  DeviceEvent mark_;
  NcclComm comm_ = nullptr;
  NcclComm child_ = nullptr;
  int rank_ = 0;
  int size_ = 0;
  bool healthy_ = true;
  bool retired_ = false;
};

}  // namespace accelerate_cpp::comm
