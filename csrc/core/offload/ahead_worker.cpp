#include "core/offload/ahead_worker.h"

#include <condition_variable>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "core/base/service_threads.h"

namespace accelerate_cpp::offload {

struct AheadWorker::State {
  State(AheadPlan plan_, std::size_t piece_bytes_, Fetch fetch_, AtExit at_exit)
      : plan(std::move(plan_)),
        piece_bytes(piece_bytes_),
        fetch(std::move(fetch_)),
        threads("accelerate-ahead", at_exit) {}

  AheadPlan plan;
  const std::size_t piece_bytes;
  const Fetch fetch;

  std::mutex mutex;
  std::condition_variable changed;  // a step or the thread has ended
  ServiceThreads threads;
  bool closed = false;
  std::optional<std::size_t> fetching;  // the unit of the step that the thread is in
};

AheadWorker::AheadWorker(AheadPlan plan, std::size_t piece_bytes, Fetch fetch, AtExit at_exit)
    : state_(std::make_shared<State>(std::move(plan), piece_bytes, std::move(fetch), at_exit)) {}

AheadWorker::~AheadWorker() {
  if (!state_->threads.forked()) {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
}

bool AheadWorker::arrive(std::size_t unit) {
  if (state_->threads.forked()) {
    return false;
  }
  std::unique_lock lock(state_->mutex);
  const bool begun = state_->plan.arrive(unit);
  if (!state_->threads.serving() && state_->plan.is_behind()) {
    try {
      state_->threads.require([state = state_] { serve(state); });
    } catch (const SystemFailure&) {  // fetching ahead only saves time
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
  state->threads.end();
  state->changed.notify_all();
}

bool AheadWorker::expects(std::size_t unit) const {
  const std::lock_guard lock(state_->mutex);
  return state_->plan.has(unit);
}

void AheadWorker::await_idle() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->threads.ended(); });
}

std::size_t AheadWorker::bytes_ahead() const {
  const std::lock_guard lock(state_->mutex);
  return state_->plan.bytes_ahead();
}

}  // namespace accelerate_cpp::offload
