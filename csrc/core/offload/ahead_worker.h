// Fetches what an AheadPlan asks for in a thread of its own, which ends when nothing is left to do.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "core/base/background.h"
#include "core/offload/ahead_plan.h"

namespace accelerate_cpp::offload {

class AheadWorker {
 public:
  // Called in the thread, for one step after the other; may not throw.
  using Fetch = std::function<void(const AheadPlan::Step&)>;

  // Steps have at most `piece_bytes`, unless units are whole. A thread that is in a step finishes it even if the worker
  // is gone, and keeps `fetch` alive until then; `at_exit` says whether the process waits for it.
  AheadWorker(AheadPlan plan, std::size_t piece_bytes, Fetch fetch, AtExit at_exit);
  ~AheadWorker();
  AheadWorker(const AheadWorker&) = delete;
  AheadWorker& operator=(const AheadWorker&) = delete;

  // The computation needs `unit` now. Returns whether fetching it had begun. A whole unit that had been begun is
  // complete by then, and no step of a forgotten one is running. Starts the thread if there is enough to do. If the
  // system refuses a thread, and in a forked child, nothing is fetched ahead. Throws InvalidArgument when there is no
  // such unit.
  bool arrive(std::size_t unit);

  // Whether the plan expects `unit` after the present one, and it was begun.
  bool expects(std::size_t unit) const;

  // Returns when nothing is left to do.
  void await_idle() const;

  std::size_t bytes_ahead() const;

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace accelerate_cpp::offload
