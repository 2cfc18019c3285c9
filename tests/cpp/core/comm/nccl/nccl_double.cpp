#include "core/comm/nccl/nccl_double.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/comm/nccl/nccl_arithmetic.h"
#include "core/comm/nccl/nccl_clique.h"

namespace accelerate_cpp::comm::testing {
namespace {

thread_local int t_group_depth = 0;
thread_local std::vector<Task> t_group;

std::map<std::string, std::shared_ptr<Clique>>& cliques() {
  static std::map<std::string, std::shared_ptr<Clique>> all;
  return all;
}

NcclResult wrong(const std::string& what, NcclResult result = NcclResult::kInvalidArgument) {
  gpu_double().problems.push_back(what);
  return result;
}

// Does `body` unless another result was ordered for this call; `comm` may be null.
template <class Body>
NcclResult entry(const char* name, NcclHandle comm, const Body& body) {
  GpuDouble& gpu = gpu_double();
  const GpuDouble::Lock lock(gpu.mutex);
  if (comm != nullptr && nccl_double().comms.count(comm) == 0) {
    return wrong(std::string(name) + " of a communicator that does not exist");
  }
  const int ordered = gpu.enter(comm == nullptr ? name : std::string(name) + " " + std::to_string(comm->rank));
  return ordered != 0 ? static_cast<NcclResult>(ordered) : body();
}

bool busy(NcclHandle comm) {
  return comm->joining != nullptr || !comm->deferred.empty();
}

NcclResult begin_step(NcclHandle comm) {
  comm->polls_left = nccl_double().polls_until_enqueued;
  return NcclResult::kInProgress;
}

NcclResult take(const char* name, Task task) {
  return entry(name, task.comm, [&] {
    const std::size_t bytes = task.count * size_of(task.type);
    const auto device = task.comm->device;
    const auto ranks = static_cast<std::size_t>(task.comm->clique->size());
    const std::size_t in = task.kind == Task::Kind::kReduceScatter ? ranks * bytes : bytes;
    const std::size_t out = task.kind == Task::Kind::kAllGather ? ranks * bytes : bytes;
    if (busy(task.comm)) {
      return wrong(std::string(name) + " while the step before is in progress");
    }
    if ((task.input != nullptr && !gpu_double().owns(task.input, in, device)) ||
        (task.output != nullptr && !gpu_double().owns(task.output, out, device))) {
      return wrong(std::string(name) + " with memory that is not of its device");
    }
    if (gpu_double().resolve(task.stream).device != device) {
      return wrong(std::string(name) + " on a stream of another device");
    }
    const std::byte* const operand = task.input == nullptr ? task.output : task.input;
    for (const auto& [key, memory] : task.comm->registrations) {
      nccl_double().registered_operands += operand >= memory.first && operand < memory.first + memory.second ? 1 : 0;
    }
    if (t_group_depth == 0) {
      return wrong(std::string(name) + " outside of a group", NcclResult::kInvalidUsage);
    }
    t_group.push_back(task);
    return NcclResult::kSuccess;
  });
}

NcclResult end_group() {
  std::map<NcclHandle, std::vector<Task>> by_comm;
  for (const Task& task : std::exchange(t_group, {})) {
    by_comm[task.comm].push_back(task);
  }
  NcclResult result = NcclResult::kSuccess;
  for (const auto& [comm, tasks] : by_comm) {
    comm->deferred.push_back([tasks = tasks] { Clique::enqueue(tasks); });
    result = begin_step(comm);
  }
  return result;
}

NcclResult remove(NcclHandle comm, bool in_order) {
  if (in_order && !comm->registrations.empty()) {
    wrong("a communicator has ended before its registrations");
  }
  comm->clique->leave(comm->rank, in_order);
  nccl_double().comms.erase(comm);
  gpu_double().advance();
  delete comm;
  return NcclResult::kSuccess;
}

NcclResult state_of(NcclHandle comm) {
  const auto broken = nccl_double().broken.find(comm->rank);
  if (broken != nccl_double().broken.end()) {
    return broken->second;
  }
  if (comm->joining != nullptr && !comm->joining()) {
    return NcclResult::kInProgress;
  }
  if (comm->polls_left > 0) {
    --comm->polls_left;
    return NcclResult::kInProgress;
  }
  comm->joining = nullptr;
  for (const auto& action : std::exchange(comm->deferred, {})) {
    action();
  }
  return NcclResult::kSuccess;
}

}  // namespace

NcclDouble& nccl_double() {
  static NcclDouble nccl;
  return nccl;
}

void NcclDouble::break_rank(int rank, NcclResult error) {
  const GpuDouble::Lock lock(gpu_double().mutex);
  broken[rank] = error;
}

void NcclDouble::reset() {
  const GpuDouble::Lock lock(gpu_double().mutex);
  version = 22703;
  polls_until_enqueued = 2;
  last_error.clear();
  registered_operands = 0;
  broken.clear();
  comms.clear();
  open_groups = 0;
  cliques().clear();
}

std::string NcclDouble::leaks() {
  const GpuDouble::Lock lock(gpu_double().mutex);
  return comms.empty() ? "" : std::to_string(comms.size()) + " communicators";
}

}  // namespace accelerate_cpp::comm::testing

using namespace accelerate_cpp::comm;           // NOLINT(google-build-using-namespace): names of a C interface follow
using namespace accelerate_cpp::comm::testing;  // NOLINT(google-build-using-namespace)

#define DOUBLE_ENTRY extern "C" __attribute__((visibility("default")))

DOUBLE_ENTRY NcclResult ncclGetVersion(int* version) {
  return entry("ncclGetVersion", nullptr, [&] {
    *version = nccl_double().version;
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  return entry("ncclGetUniqueId", nullptr, [&] {
    static int made = 0;
    std::memset(id->bytes, 0, sizeof(id->bytes));
    std::memcpy(id->bytes, &++made, sizeof(made));
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclCommInitRankConfig(NcclHandle* comm, int size, NcclUniqueId id, int rank,
                                               NcclConfig* config) {
  return entry("ncclCommInitRankConfig", nullptr, [&] {
    if (config->magic != 0xcafebeef || config->size != sizeof(NcclConfig) || config->blocking != 0) {
      return wrong("a communicator is made with a wrong configuration, or a blocking one");
    }
    std::shared_ptr<Clique>& clique = cliques()[std::string(id.bytes, sizeof(id.bytes))];
    if (clique == nullptr) {
      clique = std::make_shared<Clique>(size);
    }
    auto made = std::make_unique<NcclCommOpaque>();
    made->clique = clique;
    made->rank = rank;
    made->device = gpu_double().current_device();
    nccl_double().last_error = clique->join(made.get());
    if (!nccl_double().last_error.empty()) {
      return NcclResult::kInvalidUsage;
    }
    made->joining = [clique] { return clique->complete(); };
    *comm = made.release();
    nccl_double().comms.insert(*comm);
    return begin_step(*comm);
  });
}

DOUBLE_ENTRY NcclResult ncclCommFinalize(NcclHandle comm) {
  return entry("ncclCommFinalize", comm, [&] {
    if (busy(comm) || comm->finalized) {
      return wrong("a communicator is finalized while it is busy, or twice");
    }
    comm->finalized = true;
    comm->joining = [clique = comm->clique] { return clique->all_finalized(); };
    return begin_step(comm);
  });
}

DOUBLE_ENTRY NcclResult ncclCommDestroy(NcclHandle comm) {
  return entry("ncclCommDestroy", comm, [&] {
    return comm->finalized && !busy(comm) ? remove(comm, true) : wrong("a communicator is destroyed before its end");
  });
}

DOUBLE_ENTRY NcclResult ncclCommAbort(NcclHandle comm) {
  return entry("ncclCommAbort", comm, [&] { return remove(comm, false); });
}

DOUBLE_ENTRY NcclResult ncclCommGetAsyncError(NcclHandle comm, NcclResult* state) {
  return entry("ncclCommGetAsyncError", comm, [&] {
    *state = state_of(comm);
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY const char* ncclGetErrorString(NcclResult result) {
  return result == NcclResult::kSystemError ? "unhandled system error" : "an error of the double";
}

DOUBLE_ENTRY const char* ncclGetLastError(NcclHandle) {
  return nccl_double().last_error.c_str();
}

DOUBLE_ENTRY NcclResult ncclAllReduce(const void* input, void* output, std::size_t count, NcclDataType type,
                                      NcclRedOp op, NcclHandle comm, CudaStream stream) {
  return take("ncclAllReduce", {Task::Kind::kAllReduce, static_cast<const std::byte*>(input),
                                static_cast<std::byte*>(output), count, type, op, -1, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclReduceScatter(const void* input, void* output, std::size_t count, NcclDataType type,
                                          NcclRedOp op, NcclHandle comm, CudaStream stream) {
  return take("ncclReduceScatter", {Task::Kind::kReduceScatter, static_cast<const std::byte*>(input),
                                    static_cast<std::byte*>(output), count, type, op, -1, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclBroadcast(const void* input, void* output, std::size_t count, NcclDataType type, int root,
                                      NcclHandle comm, CudaStream stream) {
  return take("ncclBroadcast", {Task::Kind::kBroadcast, static_cast<const std::byte*>(input),
                                static_cast<std::byte*>(output), count, type, NcclRedOp::kSum, root, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclAllGather(const void* input, void* output, std::size_t count, NcclDataType type,
                                      NcclHandle comm, CudaStream stream) {
  return take("ncclAllGather", {Task::Kind::kAllGather, static_cast<const std::byte*>(input),
                                static_cast<std::byte*>(output), count, type, NcclRedOp::kSum, -1, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclSend(const void* data, std::size_t count, NcclDataType type, int peer, NcclHandle comm,
                                 CudaStream stream) {
  return take("ncclSend", {Task::Kind::kSend, static_cast<const std::byte*>(data), nullptr, count, type,
                           NcclRedOp::kSum, peer, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclRecv(void* data, std::size_t count, NcclDataType type, int peer, NcclHandle comm,
                                 CudaStream stream) {
  return take("ncclRecv", {Task::Kind::kReceive, nullptr, static_cast<std::byte*>(data), count, type, NcclRedOp::kSum,
                           peer, comm, stream});
}

DOUBLE_ENTRY NcclResult ncclGroupStart() {
  return entry("ncclGroupStart", nullptr, [] {
    ++t_group_depth;
    ++nccl_double().open_groups;
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclGroupEnd() {
  return entry("ncclGroupEnd", nullptr, [] {
    --nccl_double().open_groups;
    return --t_group_depth == 0 ? end_group() : NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclMemAlloc(void** memory, std::size_t size_bytes) {
  return entry("ncclMemAlloc", nullptr, [&] {
    *memory = gpu_double().allocate(size_bytes, true);
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclMemFree(void* memory) {
  return entry("ncclMemFree", nullptr, [&] {
    for (const NcclHandle comm : nccl_double().comms) {
      for (const auto& [key, registered] : comm->registrations) {
        if (registered.first == memory) {
          wrong("memory is released while it is registered");
        }
      }
    }
    return gpu_double().release(memory, true) ? NcclResult::kSuccess : NcclResult::kInvalidArgument;
  });
}

DOUBLE_ENTRY NcclResult ncclCommRegister(const NcclHandle comm, void* memory, std::size_t size_bytes,
                                         void** registration) {
  return entry("ncclCommRegister", comm, [&] {
    if (busy(comm) || !gpu_double().owns(memory, size_bytes, comm->device)) {
      return wrong("memory is registered while its communicator is busy, or is not of its device");
    }
    *registration = memory;
    comm->registrations[memory] = {static_cast<const std::byte*>(memory), size_bytes};
    return NcclResult::kSuccess;
  });
}

DOUBLE_ENTRY NcclResult ncclCommDeregister(const NcclHandle comm, void* registration) {
  return entry("ncclCommDeregister", comm, [&] {
    const bool there = !busy(comm) && comm->registrations.erase(registration) == 1;
    return there ? NcclResult::kSuccess : wrong("what is not registered is deregistered, or too early");
  });
}
