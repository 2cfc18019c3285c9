#include "core/comm/nccl/nccl_session.h"

#include <cstring>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

std::size_t digest_bytes(const NcclGroup& group) {
  return static_cast<std::size_t>(group.size()) * sizeof(CallDigest);
}

// Rank 0 makes the id and says so on the board, or why it could not: then nobody waits in vain.
NcclUniqueId agree_on_id(const NcclApi& api, GroupBoard& board, int rank, Deadline deadline) {
  NcclUniqueId id{};
  if (rank == 0) {
    try {
      api.check(api.get_unique_id(&id), "ncclGetUniqueId");
    } catch (const std::exception& error) {
      board.publish("/id", std::string("!") + error.what());
      throw;
    }
    board.publish("/id", "=" + std::string(id.bytes, sizeof(id.bytes)));
    return id;
  }
  const std::string text = board.await("/id", deadline);
  if (text.size() != 1 + sizeof(id.bytes) || text.front() != '=') {
    throw PeerLost("rank 0 could not begin an NCCL group: " + text.substr(text.empty() ? 0 : 1));
  }
  std::memcpy(id.bytes, text.data() + 1, sizeof(id.bytes));
  return id;
}

// Until all ranks have joined, or one of them says that it could not.
void await_all(NcclLink& link, const GroupBoard& board, const std::string& title, Deadline deadline,
               const WaitHooks& hooks) {
  constexpr std::chrono::milliseconds kLookInterval{250};
  Patience patience(deadline, hooks);
  std::chrono::milliseconds next_look = kLookInterval;
  while (!link.settled()) {
    patience.pause();
    const bool expired = patience.expired();
    if (expired || patience.waited() >= next_look) {
      if (const auto failure = board.failure(); failure.has_value()) {
        throw PeerLost(title + " failed, because " + failure->text);
      }
      next_look = patience.waited() + kLookInterval;
    }
    if (expired) {
      throw Timeout(title + " had not finished after " + std::to_string(deadline.waited().count()) +
                    " ms. Some rank has not called, or cannot be reached");
    }
    if (patience.warn_now()) {
      hooks.warn(title + " has been waiting for " + std::to_string(patience.waited().count()) +
                 " ms and goes on waiting");
    }
  }
}

}  // namespace

std::unique_ptr<NcclLink> NcclSession::join(const NcclContext& context, GroupBoard& board, int rank, int size,
                                            Deadline deadline, const WaitHooks& hooks) {
  const DeviceGuard guard(*context.device);
  const std::string title = "joining an NCCL group as rank " + std::to_string(rank) + " of " + std::to_string(size) +
                            " (cuda:" + std::to_string(context.device->index()) + ")";
  const NcclUniqueId id = agree_on_id(*context.api, board, rank, deadline);
  std::unique_ptr<NcclLink> link;
  try {
    link = std::make_unique<NcclLink>(context, id, rank, size);
    await_all(*link, board, title, deadline, hooks);
  } catch (const std::exception& error) {
    board.publish_failure({false, 0, title + ": " + error.what()});
    if (link != nullptr) {
      link->abort();
    }
    throw;
  }
  return link;
}

NcclSession::NcclSession(std::shared_ptr<NcclGroup> group, std::unique_ptr<NcclLink> link)
    : group_(std::move(group)),
      link_(std::move(link)),
      caller_(group_->context().device),
      workspace_(group_->context().device, MemoryKind::kDevice),
      device_digests_(group_->context().device, MemoryKind::kDevice, digest_bytes(*group_)),
      digests_(group_->context().device, MemoryKind::kPinned, digest_bytes(*group_)) {}

NcclSession::~NcclSession() {
  if (group_->context().device->in_forked_child()) {
    return;
  }
  if (group_->failure().has_value()) {
    const DeviceGuard guard(*group_->context().device);
    link_->abort();
  } else {
    group_->board().publish_leaving(sequence_);
  }
}

void NcclSession::run(CallRecord record, const Call& call, const std::function<void()>& body) {
  const std::lock_guard lock(mutex_);
  group_->check_usable(record.describe());
  const DeviceGuard guard(*group_->context().device);
  ++sequence_;
  record.shape = call.shape;
  record.location = call.location;
  CallWatch watch(*group_, record, sequence_, call.deadline);
  watch_ = &watch;
  try {
    order_after_caller();
    body();
    if (meets_anyway()) {
      exchange_digests(record);
    }
    await_end();
  } catch (const MismatchedCollective& error) {
    end_group(true, error.what());
    throw;
  } catch (const std::exception& error) {
    end_group(false, error.what());
    throw;
  } catch (...) {
    end_group(false, watch.title() + " was interrupted");
    throw;
  }
  watch_ = nullptr;
  if (meets_anyway()) {
    std::vector<CallDigest> digests(static_cast<std::size_t>(group_->size()));
    std::memcpy(digests.data(), digests_.data(), digest_bytes(*group_));
    if (!fit_together(digests)) {
      throw MismatchedCollective(watch.explain_mismatch());
    }
  }
}

void NcclSession::end_group(bool is_mismatch, const std::string& text) noexcept {
  watch_ = nullptr;
  group_->fail({is_mismatch, sequence_, text});
  link_->abort();
}

template <class Done>
void NcclSession::wait_until(const Done& done) {
  ACCELERATE_CHECK(watch_ != nullptr, "an operation runs");
  while (!done()) {
    meanwhile_();
    watch_->pause();
  }
}

void NcclSession::order_after_caller() {
  caller_.record(group_->caller_stream());
  link_->wait_for(caller_);
}

void NcclSession::issue(const char* call, const NcclLink::Body& body) {
  link_->issue(call, body);
  wait_until([this] { return link_->settled(); });
}

void NcclSession::issue_premul_sum(
    const char* call, NcclDataType type, void* factor,
    const std::function<NcclResult(const NcclApi&, NcclRedOp, NcclComm, CudaStream)>& body) {
  const NcclRedOp op = link_->make_premul_sum(type, factor);
  issue(call, [&](const NcclApi& api, NcclComm comm, CudaStream stream) { return body(api, op, comm, stream); });
  link_->release(op);
}

void NcclSession::copy(void* destination, const void* source, std::size_t size_bytes) {
  link_->stream().copy(destination, source, size_bytes);
}

std::unique_ptr<NcclLink> NcclSession::split(int color, int key) {
  link_->split(color, key);
  wait_until([this] { return link_->settled(); });
  std::unique_ptr<NcclLink> child = link_->child();
  if (child != nullptr) {
    wait_until([&] { return child->settled(); });
  }
  return child;
}

void NcclSession::exchange_digests(const CallRecord& record) {
  const CallDigest own(record, group_->rank());
  const std::size_t at = static_cast<std::size_t>(group_->rank()) * sizeof(own);
  std::memcpy(digests_.data() + at, &own, sizeof(own));
  copy(device_digests_.data() + at, digests_.data() + at, sizeof(own));
  issue("ncclAllGather", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
    return api.all_gather(device_digests_.data() + at, device_digests_.data(), sizeof(own), NcclDataType::kUint8, comm,
                          stream);
  });
  copy(digests_.data(), device_digests_.data(), digest_bytes(*group_));
}

void NcclSession::await_end() {
  link_->mark();
  wait_until([this] { return link_->finished(); });
}

}  // namespace accelerate_cpp::comm
