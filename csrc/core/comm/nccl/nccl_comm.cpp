#include "core/comm/nccl/nccl_comm.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "core/base/check.h"
#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

using Clock = std::chrono::steady_clock;

// How long leaving in order may take: until then the other ranks of this host must leave, too.
constexpr std::chrono::seconds kFarewell{10};
constexpr std::chrono::microseconds kShortWait{50};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr std::chrono::milliseconds kProbeInterval{50};

// Once it lasts, an eighth of the wait so far, so that the answer is noticed late by at most that part of it.
void pause_after(Clock::duration waited) {
  if (waited < kShortWait) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::min<Clock::duration>(waited / 8, kLongestPause));
  }
}

// Whether `done` has come true in time.
template <class Done>
bool wait_quietly(std::chrono::milliseconds longest, const Done& done) {
  const Clock::time_point start = Clock::now();
  const Deadline deadline = Deadline::after(longest);
  while (!done()) {
    if (deadline.expired()) {
      return false;
    }
    pause_after(Clock::now() - start);
  }
  return true;
}

std::string what_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

NcclDataType floating_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return NcclDataType::kFloat32;
    case DType::kFloat64:
      return NcclDataType::kFloat64;
    case DType::kFloat16:
      return NcclDataType::kFloat16;
    case DType::kBFloat16:
      return NcclDataType::kBfloat16;
    default:
      throw InvalidArgument("NcclComm reduces floating-point numbers; found " + std::string(name(dtype)));
  }
}

NcclRedOp nccl_op(ReduceOp op) {
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg) {
    throw InvalidArgument("NcclComm reduces by sum or avg; found " + std::string(name(op)));
  }
  return op == ReduceOp::kSum ? NcclRedOp::kSum : NcclRedOp::kAvg;
}

}  // namespace

NcclComm::NcclComm(int rank, int size, NcclContext context, NcclOptions options)
    : rank_(rank), size_(size), context_(std::move(context)), options_(std::move(options)), last_(context_.device) {}

std::shared_ptr<NcclComm> NcclComm::connect(Store& store, int rank, int size, NcclContext context, Deadline deadline,
                                            NcclOptions options) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidArgument("expected a rank of 0 to " + std::to_string(size - 1) + "; found " + std::to_string(rank) +
                          " of " + std::to_string(size));
  }
  std::shared_ptr<NcclComm> comm(new NcclComm(rank, size, std::move(context), std::move(options)));
  comm->join(store, deadline);
  return comm;
}

void NcclComm::join(Store& store, Deadline deadline) {
  const DeviceGuard guard(*context_.device);
  const std::string call = "ncclCommInitRankConfig";
  const std::string key = options_.prefix + "/id";
  NcclUniqueId id{};
  if (rank_ == 0) {
    check_result(context_.api->get_unique_id(&id), "ncclGetUniqueId");
    store.set(key, std::string(id.bytes, sizeof(id.bytes)));
  } else {
    const std::string found = store.get(key, deadline);
    ACCELERATE_CHECK(found.size() == sizeof(id.bytes), key + " is no unique id of NCCL");
    std::memcpy(id.bytes, found.data(), sizeof(id.bytes));
  }
  NcclConfig config;
  const NcclResult result = context_.api->comm_init_rank_config(&handle_, size_, id, rank_, &config);
  try {
    check_result(result, call);
  } catch (const Error& error) {
    abort(error.what());
    throw;
  }
  wait_until([&] { return completed(call); }, call + ": not all ranks have come", deadline);
}

NcclComm::~NcclComm() {
  if (handle_ == nullptr || context_.device->in_forked_child()) {
    return;
  }
  const DeviceGuard guard(*context_.device);
  finish_work();
  for (void* const registration : std::set<void*>(registrations_)) {
    deregister(registration);
  }
  if (!leave()) {
    abort("it did not end in order");
  }
}

void NcclComm::finish_work() noexcept {
  try {
    if (!wait_quietly(options_.timeout, [this] { return last_.passed() || !failure().empty(); })) {
      abort("the work of its calls did not end within " + std::to_string(options_.timeout.count()) + " ms");
    }
  } catch (const Error& error) {
    abort(error.what());
  }
}

bool NcclComm::leave() noexcept {
  const Lock lock(mutex_);
  if (handle_ == nullptr) {
    return true;
  }
  const NcclApi& api = *context_.api;
  NcclResult state = api.comm_finalize(handle_);
  if (state != NcclResult::kSuccess && state != NcclResult::kInProgress) {
    return false;
  }
  state = NcclResult::kInProgress;
  wait_quietly(kFarewell, [&] {
    return api.comm_get_async_error(handle_, &state) != NcclResult::kSuccess || state != NcclResult::kInProgress;
  });
  return state == NcclResult::kSuccess && api.comm_destroy(std::exchange(handle_, nullptr)) == NcclResult::kSuccess;
}

void NcclComm::all_reduce(MemoryView data, ReduceOp op, CudaStream stream) {
  const NcclDataType type = floating_type(data.dtype);
  const NcclRedOp nccl = nccl_op(op);
  issue("ncclAllReduce", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.all_reduce(data.data, data.data, data.count, type, nccl, comm, stream);
  });
}

void NcclComm::reduce_scatter(ConstMemoryView input, MemoryView output, ReduceOp op, CudaStream stream) {
  const NcclDataType type = floating_type(output.dtype);
  const NcclRedOp nccl = nccl_op(op);
  if (input.dtype != output.dtype || input.count != output.count * static_cast<std::size_t>(size_)) {
    throw InvalidArgument("reduce_scatter on " + place() + ": expected an input of " + std::to_string(size_) + " x " +
                          std::to_string(output.count) + " elements of " + name(output.dtype) + "; found " +
                          std::to_string(input.count) + " of " + name(input.dtype));
  }
  issue("ncclReduceScatter", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.reduce_scatter(input.data, output.data, output.count, type, nccl, comm, stream);
  });
}

void NcclComm::all_gather(ConstMemoryView input, MemoryView output, CudaStream stream) {
  if (output.size_bytes() != input.size_bytes() * static_cast<std::size_t>(size_)) {
    throw InvalidArgument("all_gather on " + place() + ": expected an output of " + std::to_string(size_) + " x " +
                          std::to_string(input.size_bytes()) + " bytes; found " + std::to_string(output.size_bytes()));
  }
  issue("ncclAllGather", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.all_gather(input.data, output.data, input.size_bytes(), NcclDataType::kUint8, comm, stream);
  });
}

void NcclComm::broadcast(MemoryView data, int root, CudaStream stream) {
  check_rank("broadcast", root);
  issue("ncclBroadcast", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.broadcast(data.data, data.data, data.size_bytes(), NcclDataType::kUint8, root, comm, stream);
  });
}

void NcclComm::send(ConstMemoryView data, int destination, CudaStream stream) {
  check_rank("send", destination);
  issue("ncclSend", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.send(data.data, data.size_bytes(), NcclDataType::kUint8, destination, comm, stream);
  });
}

void NcclComm::receive(MemoryView data, int source, CudaStream stream) {
  check_rank("receive", source);
  issue("ncclRecv", stream, [&](const NcclApi& api, NcclHandle comm) {
    return api.receive(data.data, data.size_bytes(), NcclDataType::kUint8, source, comm, stream);
  });
}

void NcclComm::issue(const char* call, CudaStream stream, const Body& body) {
  const auto ask = [&] {
    check_result(body(*context_.api, handle_), call);
    group_stream_ = stream;
  };
  {
    const Lock lock(mutex_);
    if (in_group_) {
      check_usable(call);
      ask();
      return;
    }
  }
  group(ask);
}

void NcclComm::group(const std::function<void()>& calls) {
  const std::string call = "a call of NCCL";
  const DeviceGuard guard(*context_.device);
  std::optional<CudaStream> stream;
  {
    const Lock lock(mutex_);
    check_usable(call);
    ACCELERATE_CHECK(!in_group_, "a group of NCCL calls within another");
    const NcclApi& api = *context_.api;
    const NcclResult start = api.group_start();
    in_group_ = start == NcclResult::kSuccess;
    group_stream_.reset();
    try {
      check_result(start, "ncclGroupStart");
      calls();
      check_usable(call);
      in_group_ = false;
      check_result(api.group_end(), "ncclGroupEnd");
    } catch (...) {
      // A group that stays open would swallow all that follows.
      if (std::exchange(in_group_, false)) {
        api.group_end();
      }
      abort(what_of(std::current_exception()));
      throw;
    }
    stream = group_stream_;
  }
  wait_until([&] { return completed(call); },
             call +
                 " is not on its stream yet: NCCL may be connecting to ranks that have "
                 "not made it",
             Deadline::after(options_.timeout));
  if (stream) {
    last_.record(*stream);
  }
}

template <class Done>
void NcclComm::wait_until(const Done& done, const std::string& what, Deadline deadline) {
  const Clock::time_point start = Clock::now();
  Clock::time_point next_probe = start + kProbeInterval;
  try {
    while (!done()) {
      if (deadline.expired()) {
        throw Timeout(what + " after " + std::to_string(deadline.waited().count()) + " ms, on " + place() +
                      ". A rank may have failed, or be elsewhere in the program; its log says more");
      }
      const Clock::time_point now = Clock::now();
      if (now >= next_probe) {
        options_.probe();
        next_probe = now + kProbeInterval;
      }
      pause_after(now - start);
    }
  } catch (...) {
    abort(what_of(std::current_exception()));
    throw;
  }
}

void NcclComm::wait(const DeviceEvent& event, Deadline deadline) {
  const std::string call = "work on the GPU";
  const DeviceGuard guard(*context_.device);
  wait_until(
      [&] {
        // In this order: after an abort the event passes, too.
        const bool passed = event.passed();
        return completed(call) && passed;
      },
      call + " has not ended", deadline);
}

void NcclComm::check() {
  try {
    completed("an earlier call of NCCL");
  } catch (const Error& error) {
    abort(error.what());
    throw;
  }
}

bool NcclComm::completed(const std::string& call) const {
  const Lock lock(mutex_);
  check_usable(call);
  NcclResult state = NcclResult::kSuccess;
  check_result(context_.api->comm_get_async_error(handle_, &state), "ncclCommGetAsyncError");
  check_result(state, call);
  return state != NcclResult::kInProgress;
}

void NcclComm::check_result(NcclResult result, const std::string& call) const {
  context_.api->check(result, (call + " on " + place()).c_str());
}

void NcclComm::check_usable(const std::string& call) const {
  if (context_.device->in_forked_child()) {
    throw PeerLost(call + " on " + place() + ": this process was forked off the one that has the communicator");
  }
  const std::string why = failure();
  if (!why.empty()) {
    throw PeerLost(call + " on " + place() + ": the communicator has ended: " + why);
  }
}

void NcclComm::check_rank(const char* call, int rank) const {
  if (rank < 0 || rank >= size_) {
    throw InvalidArgument(std::string(call) + " on " + place() + ": there is no rank " + std::to_string(rank));
  }
}

void NcclComm::abort(const std::string& reason) noexcept {
  const Lock lock(mutex_);
  if (failure_.empty()) {
    failure_ = reason;
  }
  // A group that is open refers to the communicator; its end aborts.
  if (handle_ != nullptr && !in_group_ && !context_.device->in_forked_child()) {
    const DeviceGuard guard(*context_.device);
    context_.api->comm_abort(std::exchange(handle_, nullptr));
  }
}

std::string NcclComm::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

std::string NcclComm::place() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         " (cuda:" + std::to_string(context_.device->index()) + ")";
}

std::shared_ptr<NcclMemory> NcclComm::allocate(std::size_t size_bytes) {
  check_usable("ncclMemAlloc");
  return std::make_shared<NcclMemory>(*this, std::max<std::size_t>(size_bytes, 1));
}

void NcclComm::deregister(void* registration) noexcept {
  const Lock lock(mutex_);
  if (registrations_.erase(registration) > 0 && handle_ != nullptr) {
    context_.api->comm_deregister(handle_, registration);
  }
}

NcclMemory::NcclMemory(NcclComm& comm, std::size_t size_bytes)
    : context_(comm.context()), comm_(comm.weak_from_this()) {
  const DeviceGuard guard(*context_.device);
  const NcclApi& api = *context_.api;
  if (!api.registers()) {
    context_.device->api().check(context_.device->api().allocate(&data_, size_bytes),
                                 ("cudaMalloc of " + std::to_string(size_bytes) + " bytes").c_str());
    return;
  }
  comm.check_result(api.mem_alloc(&data_, size_bytes), "ncclMemAlloc of " + std::to_string(size_bytes) + " bytes");
  const NcclComm::Lock lock(comm.mutex_);
  try {
    comm.check_usable("ncclCommRegister");
    comm.check_result(api.comm_register(comm.handle_, data_, size_bytes, &registration_), "ncclCommRegister");
  } catch (...) {
    api.mem_free(data_);
    throw;
  }
  if (registration_ != nullptr) {  // else NCCL's settings say that nothing is to be registered
    comm.registrations_.insert(registration_);
  }
}

NcclMemory::~NcclMemory() {
  if (context_.device->in_forked_child()) {
    return;
  }
  const DeviceGuard guard(*context_.device);
  if (const std::shared_ptr<NcclComm> comm = comm_.lock()) {
    comm->finish_work();
    comm->deregister(registration_);
  }
  if (context_.api->registers()) {
    context_.device->api().device_synchronize();  // as cudaFree does by itself
    context_.api->mem_free(data_);
  } else {
    context_.device->api().release(data_);
  }
}

}  // namespace accelerate_cpp::comm
