// A Communicator as a torch.distributed backend.
//
// A synchronous call runs in the caller and is complete when it returns. An asynchronous one goes into a WorkQueue and
// is run, in the order of issue, by a thread that waits for it or by the queue's thread. Sends and receives are posted
// at once, independently of collectives; a TransferPump makes progress on them. Tensors stay alive until their
// operation has ended, whether or not anybody holds its Work.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/background.h"
#include "core/comm/communicator.h"
#include "core/comm/traffic.h"
#include "core/comm/transfer_pump.h"
#include "core/comm/work_queue.h"
#include "torch_bridge/c10d_work.h"

namespace accelerate_cpp::comm {

class C10dBackend;

// The callbacks of a backend into the program.
struct BackendHooks {
  // Called every 50 ms within waits; throws to end them.
  InterruptProbe probe = [] {};
  // Where the user's program is, the text of a CallSite. Asked for when an asynchronous operation is issued.
  std::function<std::string()> call_site = [] { return std::string(); };
  Rethrow rethrow = [] { throw; };
  // Called at the beginning and at the end of each backend that has these hooks.
  std::function<void(C10dBackend&)> remember = [](C10dBackend&) {};
  std::function<void(C10dBackend&)> forget = [](C10dBackend&) {};
};

class C10dBackend final : public ::c10d::Backend {
 public:
  C10dBackend(std::shared_ptr<Communicator> communicator, std::string backend_name, std::chrono::milliseconds timeout,
              BackendHooks hooks = {});

  ~C10dBackend() override;

  // For operations that do not go through the backend. They also wait for the asynchronous ones issued before them.
  const std::shared_ptr<Communicator>& communicator() const { return ordered_; }
  std::chrono::milliseconds timeout() const { return options_->timeout; }
  // What has been issued through the backend, whether or not it has ended; in a window, as what it consists of.
  const Traffic& traffic() const { return traffic_; }

  // Gives up whatever is under way, ends the threads, and leaves the group: for use before the interpreter ends, which
  // the threads may need. With a `reason`, or if something was under way, peers treat this rank as failed.
  void leave(const std::string& reason = "");

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  // How many collectives have been issued: equal on all ranks at the same place of the program.
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}  // all ranks begin with 0
  ::c10d::ErrorType getError() override { return *error_; }

  // Waits for what is under way, ends the threads and leaves the group. Later calls throw InvalidArgument.
  void shutdown() override;
  // Makes current and later operations raise PeerLost on every rank.
  void abort() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<::c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  // Calls between the two are collected into one Work; they run as usual. This still returns false: given true, torch's
  // batch_isend_irecv opens a coalescing window that an exception never closes, after which torch silently drops the
  // collectives of the group. For the same reason no call throws within a window: the Work of the window does.
  bool supportsCoalescing() const override { return false; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  // Tensors on which collectives are zero-copy.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  WorkPointer broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const ::c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const ::c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const ::c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const ::c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const ::c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                            std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& options) override;
  WorkPointer barrier(const ::c10d::BarrierOptions& options) override;
  // A Timeout names every rank that is missing, with or without `wait_all_ranks`.
  void monitoredBarrier(const ::c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPointer send(Tensors& tensors, int destination, int tag) override;
  WorkPointer recv(Tensors& tensors, int source, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;

 private:
  // What all operations have in common.
  struct Order {
    ::c10d::OpType type;
    const char* title;  // for profilers
    bool asynchronous;
    std::chrono::milliseconds timeout;
    Shape shape = {};  // where it is the same on all ranks
  };
  using Operation = std::function<void(Communicator& communicator, const Call& call)>;

  // `action` checks the arguments of a call and returns its Work.
  template <class Action>
  WorkPointer issue(::c10d::OpType type, const Action& action) {
    try {
      return collect(action());
    } catch (...) {
      return refuse(type, std::current_exception());
    }
  }

  // Runs `operation` (which is called once, as an Operation) now, or later in its turn. `results` is what its Work
  // holds.
  template <class Body>
  WorkPointer submit(const Order& order, Tensors results, Body operation) {
    const std::uint64_t sequence = ++sequence_;
    if (order.asynchronous) {
      return enqueue(order, sequence, std::move(results), std::move(operation));
    }
    queue_->drain();
    RECORD_USER_SCOPE(order.title);
    operation(*communicator_, Call(deadline(order.timeout), order.shape));
    return completed_work(order.type, sequence, std::move(results));
  }

  WorkPointer enqueue(const Order& order, std::uint64_t sequence, Tensors results, Operation operation);
  WorkPointer receive(::c10d::OpType type, Tensors& tensors, int source, int tag);
  // The timeout that the caller asked for, else that of the group.
  std::chrono::milliseconds effective_timeout(std::chrono::milliseconds requested) const;
  Deadline deadline(std::chrono::milliseconds requested) const { return Deadline::after(effective_timeout(requested)); }
  // Adds the work to the coalescing window of this thread, if there is one.
  WorkPointer collect(WorkPointer work);
  WorkPointer refuse(::c10d::OpType type, const std::exception_ptr& error);
  bool coalesces_here() const;
  // Counts an operation on `tensor`, and one on each of several.
  void count(CallKind kind, const at::Tensor& tensor) { traffic_.add(kind, tensor.nbytes()); }
  void count_each(CallKind kind, const Tensors& tensors);
  // Counts one operation on all of `tensors`.
  void count_joint(CallKind kind, const Tensors& tensors);

  const std::shared_ptr<Communicator> communicator_;
  const c10::intrusive_ptr<Options> options_;
  const BackendHooks hooks_;
  const OwnerProcess process_;
  // Outlives the backend in the operations under way.
  const std::shared_ptr<std::atomic<::c10d::ErrorType>> error_;
  std::atomic<std::uint64_t> sequence_{0};
  Traffic traffic_;
  std::atomic<bool> closed_{false};
  const std::shared_ptr<WorkQueue> queue_;
  const std::shared_ptr<Communicator> ordered_;
  TransferPump pump_;

  // The coalescing window. One thread at a time has one.
  std::atomic<bool> coalescing_{false};
  mutable std::mutex window_mutex_;
  std::thread::id window_owner_;
  std::vector<WorkPointer> window_;
};

}  // namespace accelerate_cpp::comm
