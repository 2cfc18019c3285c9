#include "core/offload/ahead_worker.h"

#include <condition_variable>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::offload {

struct AheadWorker::State {
  State(AheadPlan plan_, std::size_t piece_bytes_, Fetch fetch_, AtExit at_exit_)
      : plan(std::move(plan_)), piece_bytes(piece_bytes_), fetch(std::move(fetch_)), at_exit(at_exit_) {}

  AheadPlan plan;
  const std::size_t piece_bytes;
  const Fetch fetch;
  const AtExit at_exit;
  const std::uint64_t generation = fork_generation();

  std::mutex mutex;
  std::condition_variable changed;  // a step has ended, or the thread
  bool serving = false;
  bool closed = false;
  std::optional<std::size_t> fetching;  // the unit of the step that the thread is in
};

AheadWorker::AheadWorker(AheadPlan plan, std::size_t piece_bytes, Fetch fetch, AtExit at_exit)
    : state_(std::make_shared<State>(std::move(plan), piece_bytes, std::move(fetch), at_exit)) {}

AheadWorker::~AheadWorker() {
  if (fork_generation() == state_->generation) {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
}

bool AheadWorker::arrive(std::size_t unit) {
  if (fork_generation() != state_->generation) {  // the thread did not come along, and may have held the mutex
    return false;
  }
  std::unique_lock lock(state_->mutex);
  const bool begun = state_->plan.arrive(unit);
  if (!state_->serving && state_->plan.is_behind()) {
    try {
      start_background_thread("accelerate-ahead", [state = state_] { serve(state); }, state_->at_exit);
      state_->serving = true;
    } catch (const SystemFailure&) {  // it only would be faster
    }
  }
  if (state_->plan.granularity() == Granularity::kWholeUnits) {
    state_->changed.wait(lock, [this] { return !state_->fetching || state_->plan.has(*state_->fetching); });
  }
  return begun;
}

void AheadWorker::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (!state->closed) {
    const std::optional<AheadPlan::Step> step = state->plan.next(state->piece_bytes);
    if (!step.has_value()) {
      break;
    }
    state->fetching = step->unit;
    lock.unlock();
    state->fetch(*step);
    lock.lock();
    state->fetching.reset();
    state->changed.notify_all();
  }
  state->serving = false;
  state->changed.notify_all();
}

bool AheadWorker::expects(std::size_t unit) const {
  const std::lock_guard lock(state_->mutex);
  return state_->plan.has(unit);
}

void AheadWorker::await_idle() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return !state_->serving; });
}

std::size_t AheadWorker::bytes_ahead() const {
  const std::lock_guard lock(state_->mutex);
  return state_->plan.bytes_ahead();
}

}  // namespace accelerate_cpp::offload
