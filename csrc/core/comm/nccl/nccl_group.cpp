#include "core/comm/nccl/nccl_group.h"

#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

NcclGroup::NcclGroup(NcclContext context, GroupBoard board, NcclOptions options, int rank, int size)
    : context_(std::move(context)), board_(std::move(board)), options_(std::move(options)), rank_(rank), size_(size) {}

std::string NcclGroup::place() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
         " (cuda:" + std::to_string(context_.device->index()) + ")";
}

void NcclGroup::fail(const Failure& failure, bool tell_others) noexcept {
  if (this->failure().has_value()) {
    return;
  }
  if (tell_others) {
    // First: what this rank gives up when it knows must not look to others like a call that differs from theirs.
    board_.publish_failure(failure);
  }
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value()) {
    failure_ = failure;
  }
}

std::optional<NcclGroup::Failure> NcclGroup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void NcclGroup::check_not_forked(const std::string& what) const {
  if (context_.device->in_forked_child()) {
    throw PeerLost(what +
                   ": this process was forked after the group was made, and CUDA does not work in it. Use the "
                   "group in the process that made it, or start processes by spawning");
  }
}

void NcclGroup::check_usable(const std::string& what) const {
  check_not_forked(what);
  const std::optional<Failure> failure = this->failure();
  if (failure.has_value()) {
    throw PeerLost(what + " on " + place() + ": the group is unusable, because " + failure->text);
  }
}

}  // namespace accelerate_cpp::comm
