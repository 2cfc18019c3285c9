#include "core/comm/nccl/nccl_link.h"

#include <chrono>
#include <utility>

#include "core/comm/nccl/patience.h"

namespace accelerate_cpp::comm {
namespace {

// How long an end in order may take: until then the other ranks of this host must end theirs, too.
constexpr std::chrono::seconds kFarewell{10};
// How long the GPU may take to leave an aborted kernel.
constexpr std::chrono::seconds kLettingGo{5};

template <class Done>
bool wait_quietly(std::chrono::milliseconds longest, const Done& done) {
  const WaitHooks none;
  Patience patience(Deadline::after(longest), none);
  while (!done()) {
    if (patience.expired()) {
      return false;
    }
    patience.pause();
  }
  return true;
}

}  // namespace

NcclLink::NcclLink(NcclContext context, const NcclUniqueId& id, int rank, int size)
    : context_(std::move(context)), stream_(context_.device), mark_(context_.device), rank_(rank), size_(size) {
  NcclConfig config;
  const NcclResult result = context_.api->comm_init_rank_config(&comm_, size, id, rank, &config);
  try {
    context_.api->check(result, "ncclCommInitRankConfig");
  } catch (...) {
    abort();
    throw;
  }
}

NcclLink::NcclLink(NcclContext context, NcclComm comm)
    : context_(std::move(context)), stream_(context_.device), mark_(context_.device), comm_(comm) {}

void NcclLink::split(int color, int key) {
  NcclConfig config;
  context_.api->check(context_.api->comm_split(comm_, color < 0 ? kNcclSplitNoColor : color, key, &child_, &config),
                      "ncclCommSplit");
}

std::unique_ptr<NcclLink> NcclLink::child() {
  if (child_ == nullptr) {
    return nullptr;
  }
  return std::unique_ptr<NcclLink>(new NcclLink(context_, std::exchange(child_, nullptr)));
}

void NcclLink::issue(const char* call, const Body& body) {
  const NcclApi& api = *context_.api;
  api.check(api.group_start(), "ncclGroupStart");
  const NcclResult result = body(api, comm_, stream_.get());
  const NcclResult end =
      api.group_end();  // also after an error: a group that stays open would swallow all that follows
  api.check(result, call);
  api.check(end, call);
}

bool NcclLink::settled() {
  NcclResult state = NcclResult::kSuccess;
  context_.api->check(context_.api->comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
  context_.api->check(state, "an earlier call of NCCL");
  if (state == NcclResult::kInProgress) {
    return false;
  }
  if (size_ == 0) {
    context_.api->check(context_.api->comm_user_rank(comm_, &rank_), "ncclCommUserRank");
    context_.api->check(context_.api->comm_count(comm_, &size_), "ncclCommCount");
  }
  return true;
}

bool NcclLink::finished() {
  return settled() && mark_.passed();
}

NcclRedOp NcclLink::make_premul_sum(NcclDataType type, void* factor) {
  NcclRedOp op = NcclRedOp::kSum;
  context_.api->check(
      context_.api->redop_create_premul_sum(&op, factor, type, NcclScalarResidence::kHostImmediate, comm_),
      "ncclRedOpCreatePreMulSum");
  return op;
}

void NcclLink::release(NcclRedOp op) {
  context_.api->check(context_.api->redop_destroy(op, comm_), "ncclRedOpDestroy");
}

void NcclLink::abort() noexcept {
  healthy_ = false;
  for (NcclComm* comm : {&comm_, &child_}) {  // a split that is under way may still bring the child
    if (*comm != nullptr) {
      context_.api->comm_abort(std::exchange(*comm, nullptr));
    }
  }
  const CudaApi& cuda = context_.device->api();
  wait_quietly(kLettingGo, [&] { return cuda.stream_query(stream_.get()) != CudaStatus::kNotReady; });
}

void NcclLink::retire() noexcept {
  if (retired_ || comm_ == nullptr) {
    return;
  }
  retired_ = true;
  const NcclApi& api = *context_.api;
  NcclResult state = NcclResult::kSuccess;
  const bool idle = healthy_ && child_ == nullptr &&
                    context_.device->api().stream_query(stream_.get()) == CudaStatus::kSuccess &&
                    api.comm_get_async_error(comm_, &state) == NcclResult::kSuccess && state == NcclResult::kSuccess;
  const NcclResult result = idle ? api.comm_finalize(comm_) : NcclResult::kInternalError;
  healthy_ = result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

// Whether the communicator that was retired has ended.
bool NcclLink::end_in_order() noexcept {
  const NcclApi& api = *context_.api;
  NcclResult state = NcclResult::kInProgress;
  wait_quietly(kFarewell, [&] {
    return api.comm_get_async_error(comm_, &state) != NcclResult::kSuccess || state != NcclResult::kInProgress;
  });
  return state == NcclResult::kSuccess && api.comm_destroy(std::exchange(comm_, nullptr)) == NcclResult::kSuccess;
}

NcclLink::~NcclLink() {
  if (context_.device->in_forked_child() || (comm_ == nullptr && child_ == nullptr)) {
    return;
  }
  const DeviceGuard guard(*context_.device);
  retire();
  if (!healthy_ || !end_in_order()) {
    abort();
  }
}

}  // namespace accelerate_cpp::comm
