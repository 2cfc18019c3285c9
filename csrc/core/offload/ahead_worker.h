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

  // Steps are of at most `piece_bytes`, unless units are whole. A thread that has begun a step may outlive the worker
  // by it, and with it what `fetch` holds; `at_exit` says whether the process waits for that.
  AheadWorker(AheadPlan plan, std::size_t piece_bytes, Fetch fetch, AtExit at_exit);
  ~AheadWorker();
  AheadWorker(const AheadWorker&) = delete;
  AheadWorker& operator=(const AheadWorker&) = delete;

  // The computation needs `unit` now. Returns whether it was begun before. A whole unit that was is there then, and no
  // step of one that the plan has forgotten goes on. Starts the thread if there is enough to do; where the system
  // refuses one nothing is fetched ahead, nor is it in a child that was forked. Throws InvalidArgument when there is no
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
