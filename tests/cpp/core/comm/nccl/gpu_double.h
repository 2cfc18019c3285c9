// A stand-in for the CUDA runtime: its devices are this process, their memory is memory of the host, and streams are
// lists of work that move on whenever anybody asks how far they are. So everything is as asynchronous as on a GPU, but
// repeatable. NCCL operations reach device memory only through here, so that a wrong address is noticed.
//
// Built as a shared library that has CUDA's entry points; tests reach into it through gpu_double().
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/comm/nccl/cuda_api.h"

namespace accelerate_cpp::comm {

struct CudaStreamOpaque {
  int device = 0;
  std::deque<std::function<bool()>> work;  // the first is tried until it returns true
};

struct CudaEventOpaque {
  int device = 0;
  std::shared_ptr<bool> passed;  // null: never recorded
};

namespace testing {

class __attribute__((visibility("default"))) GpuDouble {
 public:
  // Guards everything here and in the NCCL double.
  std::recursive_mutex mutex;
  using Lock = std::lock_guard<std::recursive_mutex>;

  int device_count = 8;

  // Back to the beginning, with device 0 current in this thread; what still exists is forgotten.
  void reset();

  // Lets call number `nth` (from 1) of `entry` from now on return `status`, and do nothing.
  void fail(const std::string& entry, int nth, int status);

  // Stops the stream at this point until release() of the returned flag.
  std::shared_ptr<bool> hold(CudaStream stream);
  void release(const std::shared_ptr<bool>& held);
  // Puts `work` onto the stream, as a kernel; it is tried until it returns true.
  void enqueue(CudaStream stream, std::function<bool()> work);
  // Lets all streams do what they can; whether `stream` has nothing left.
  bool idle(CudaStream stream);

  // What was done wrong: foreign addresses, streams destroyed at work, objects of other devices.
  std::vector<std::string> problems;
  // What has not been released, as text; empty: nothing.
  std::string leaks();

  // All calls of both libraries but for queries, in order: "cudaMalloc", "ncclAllReduce 0" (of rank 0).
  std::vector<std::string> calls;
  // How often `entry` was called, queries too.
  std::size_t count_calls(const std::string& entry);
  // While other threads call, too.
  bool was_called(const std::string& call);

  // For the doubles' entry points, with the mutex held.
  int enter(const std::string& call);  // records the call; the status that was ordered for it, or 0
  void advance();
  CudaStreamOpaque& resolve(CudaStream stream);  // the default stream for null
  bool owns(const void* memory, std::size_t size_bytes, int device) const;
  int current_device() const;

  struct Allocation {
    std::size_t size_bytes;
    int device;
    bool by_nccl;
  };
  void* allocate(std::size_t size_bytes, bool by_nccl);
  bool release(void* memory, bool by_nccl);
  std::map<const std::byte*, Allocation> allocations;
  std::set<CudaStream> streams;
  std::set<CudaEvent> events;
  std::map<int, CudaStreamOpaque> default_streams;

 private:
  struct Order {
    int calls_left;
    int status;
  };
  std::map<std::string, Order> orders_;
  std::map<std::string, std::size_t> counts_;
};

__attribute__((visibility("default"))) GpuDouble& gpu_double();

}  // namespace testing
}  // namespace accelerate_cpp::comm
