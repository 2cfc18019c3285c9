// NCCL for gradient buckets: one communicator (ncclComm_t) of one rank on one GPU.
//
// Calls put work on a stream of the caller's and return; the host never waits for the GPU. It waits only until NCCL has
// put the work on the stream, which takes microseconds, but for the first calls, in which NCCL connects the ranks. An
// event (DeviceEvent) says when work has ended: record it behind the call, let another stream wait for it, or wait() on
// the host with a deadline. Calls are on one stream, or on streams that wait for each other.
//
// The first error ends the communicator for good (ncclCommAbort), which also takes its kernels off the GPU: streams go
// on, and what they hold is worth nothing. From then on every call throws PeerLost. Another rank notices when NCCL
// tells it, or when its own wait() reaches its deadline; nothing else tells the ranks of each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/nccl/cuda_objects.h"
#include "core/comm/nccl/nccl_api.h"
#include "core/comm/options.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

// The libraries and the device that a communicator works with.
struct NcclContext {
  std::shared_ptr<const NcclApi> api;
  std::shared_ptr<const CudaDevice> device;  // no two ranks have the same
};

struct NcclOptions {
  // Begins all keys in the store; communicators that share a store need different ones.
  std::string prefix = "nccl";
  // How long NCCL may take to put a call on its stream; it connects to ranks that make the same call.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  // Called about every 50 ms while the host waits. What it throws ends the wait, and the communicator.
  InterruptProbe probe = [] {};
};

class NcclMemory;

// Calls come from one thread at a time; abort() and failure() from any. Views are of memory of the device, except that
// empty ones may be null, and stay valid until the work has ended. In a forked child every call throws PeerLost and the
// destructor does nothing.
class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  // Joins the `size` ranks that share `store`. Throws Timeout when some have not come by the deadline, InvalidArgument
  // for a rank that cannot be or a GPU that another rank has, and SystemFailure.
  static std::shared_ptr<NcclComm> connect(Store& store, int rank, int size, NcclContext context, Deadline deadline,
                                           NcclOptions options = {});
  // Lets what is under way end, for as long as a call may take, and leaves in order: NCCL waits for the ranks of this
  // host to leave, too. Aborts when that takes longer than ten seconds.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const NcclContext& context() const { return context_; }

  // Collectives. All ranks make the same calls in the same order. Reductions are sums and averages of floating-point
  // numbers; everything else moves any dtype. Each throws InvalidArgument, before anything has been asked of NCCL, for
  // operands that do not fit together; Timeout when NCCL does not get the work onto the stream; PeerLost; and
  // SystemFailure.

  // In place.
  void all_reduce(MemoryView data, ReduceOp op, CudaStream stream);
  // `input` has size() parts as large as `output`, which gets the reduced part number rank().
  void reduce_scatter(ConstMemoryView input, MemoryView output, ReduceOp op, CudaStream stream);
  // `output` gets the inputs of all ranks, in their order.
  void all_gather(ConstMemoryView input, MemoryView output, CudaStream stream);
  // In place, from rank `root`.
  void broadcast(MemoryView data, int root, CudaStream stream);

  // To and from another rank. Two ranks that send to each other do so within group().
  void send(ConstMemoryView data, int destination, CudaStream stream);
  void receive(MemoryView data, int source, CudaStream stream);

  // Makes all calls within `calls`, which are on one stream, one call (ncclGroupStart, ncclGroupEnd): they begin
  // together, and none waits for another. What `calls` throws ends the communicator.
  void group(const std::function<void()>& calls);

  // Returns when `event` has passed. Throws Timeout when the deadline passes first, PeerLost or SystemFailure when NCCL
  // has noticed an error or the communicator has ended: then the work before the event may have been cut off.
  void wait(const DeviceEvent& event, Deadline deadline);
  // Throws as wait() when NCCL has noticed an error by itself. Never waits.
  void check();

  // Memory of the device that the library has allocated and registered for this communicator (ncclMemAlloc,
  // ncclCommRegister), so that the GPUs and the network can reach it without copies; plain memory where it cannot.
  // Aligned to at least 256 bytes.
  std::shared_ptr<NcclMemory> allocate(std::size_t size_bytes);

  // Ends the communicator because of `reason`; the first one stays. Never throws.
  void abort(const std::string& reason) noexcept;
  // Why it has ended; empty: it has not.
  std::string failure() const;

  // "rank 0 of 2 (cuda:0)", for messages.
  std::string place() const;

 private:
  friend class NcclMemory;
  using Body = std::function<NcclResult(const NcclApi& api, NcclHandle comm)>;
  using Lock = std::lock_guard<std::recursive_mutex>;

  NcclComm(int rank, int size, NcclContext context, NcclOptions options);

  void join(Store& store, Deadline deadline);
  void issue(const char* call, CudaStream stream, const Body& body);
  void check_usable(const std::string& call) const;
  void check_rank(const char* call, int rank) const;
  void check_result(NcclResult result, const std::string& call) const;
  // Whether NCCL has done what it was asked for; throws what it says instead.
  bool completed(const std::string& call) const;
  template <class Done>
  void wait_until(const Done& done, const std::string& what, Deadline deadline);
  // Waits for the work of all calls, and aborts when that takes too long.
  void finish_work() noexcept;
  bool leave() noexcept;
  void deregister(void* registration) noexcept;

  const int rank_;
  const int size_;
  const NcclContext context_;
  const NcclOptions options_;
  DeviceEvent last_;                    // behind the latest call
  mutable std::recursive_mutex mutex_;  // guards what follows; never held while waiting
  NcclHandle handle_ = nullptr;         // null once it has ended
  std::string failure_;
  std::set<void*> registrations_;
  bool in_group_ = false;
  std::optional<CudaStream> group_stream_;  // of the calls of the group that is open
};

// Memory of a device. May outlive its communicator. Releasing it waits until the device is idle.
class NcclMemory {
 public:
  NcclMemory(NcclComm& comm, std::size_t size_bytes);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  bool is_registered() const { return registration_ != nullptr; }

 private:
  const NcclContext context_;
  const std::weak_ptr<NcclComm> comm_;
  void* data_ = nullptr;
  void* registration_ = nullptr;
};

}  // namespace accelerate_cpp::comm
