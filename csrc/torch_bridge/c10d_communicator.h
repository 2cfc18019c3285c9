// Any torch process group (Gloo, MPI, …) as a Communicator of ordinary memory: how ranks on other hosts are reached.
//
// Every operation is built from one collective of the engine, an all-to-all of blocks of bytes. Values are reduced
// here, in rank order, so results are bitwise equal on all ranks, and every dtype and reduction works on every engine.
// Since each rank talks to every other, the end of one shows on all of them.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/comm/call_check.h"
#include "core/comm/communicator.h"
#include "core/comm/message_matcher.h"
#include "torch_bridge/c10d_engine.h"
#include "torch_bridge/c10d_port.h"

namespace accelerate_cpp::comm {

class C10dCommunicator final : public Communicator {
 public:
  // With `check_calls` ranks compare what they ask for before each operation, which takes one more all-to-all of
  // 16 bytes; without it the caller guarantees that they ask for the same, and a difference may crash the process.
  explicit C10dCommunicator(std::shared_ptr<C10dEngine> engine, bool check_calls = true);
  ~C10dCommunicator() override;
  C10dCommunicator(const C10dCommunicator&) = delete;
  C10dCommunicator& operator=(const C10dCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name_of(int rank) const override { return engine_->hooks().name_of(rank); }
  void all_reduce(MemoryView data, Reduction reduction, const Call& call) override;
  void reduce(MemoryView data, int root, Reduction reduction, const Call& call) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                      const Call& call) override;
  void broadcast(MemoryView data, int root, const Call& call) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) override;
  // Like gather and scatter, it takes the operands whole, since no rank knows the sizes of all pairs.
  void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                  const Call& call) override;
  void barrier(const Call& call) override;
  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Communicator> split(int color, int key, const Call& call) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  // Waits briefly until everything that this rank has sent is out.
  void leave() noexcept override;
  bool someone_has_left() override;
  void abort(const std::string& reason) noexcept override;

 private:
  using AllToAll = C10dEngine::AllToAll;
  using Inputs = std::vector<ConstMemoryView>;

  // One all-to-all of an operation, which may be made of many: what to give, what comes, what to do with it.
  struct Step {
    Inputs inputs;
    std::vector<std::size_t> expected_bytes;
    std::function<void(const AllToAll& blocks)> take;
  };
  struct PlannedStep {
    std::function<Step()> make;
    std::size_t after = 0;  // how many of the earlier steps must have been taken before this one is made
  };
  using Plan = std::vector<PlannedStep>;

  // Runs `body` as one operation: one at a time in this process, after the check, and with failures reported to all
  // ranks.
  void run(const CallRecord& record, const Call& call, const std::function<void()>& body);
  // Runs the steps in order, two of them at a time.
  void run_steps(const Plan& plan, const Call& call);
  void run_step(Step step, const Call& call);
  std::string all_gather_bytes(const std::string& own, const Call& call);

  Inputs nothing(DType dtype) const { return Inputs(static_cast<std::size_t>(size_), {nullptr, 0, dtype}); }
  std::vector<std::size_t> no_bytes() const { return std::vector<std::size_t>(static_cast<std::size_t>(size_)); }
  bool goes_directly(MemoryView data) const;
  // How many elements a step may move between each pair when it moves as many between all.
  std::size_t step_count(DType dtype) const;
  // Every rank's factor for a pre-multiplied sum; empty for other reductions.
  std::vector<double> factors(const Reduction& reduction, const Call& call);
  // Reduces `own` and what came from the other ranks into `output`.
  void combine(const AllToAll& blocks, ConstMemoryView own, MemoryView output, const Reduction& reduction,
               const std::vector<double>& factors) const;
  Step gather_step(ConstMemoryView input, const std::vector<MemoryView>& outputs) const;
  Step reduce_step(Inputs inputs, ConstMemoryView own, MemoryView output, const Reduction& reduction,
                   const std::vector<double>& factors) const;
  Plan plan_in_slices(MemoryView data, const std::function<Step(const std::vector<MemoryView>& slices)>& first,
                      const std::function<Step(const std::vector<MemoryView>& slices)>& second) const;

  const std::shared_ptr<C10dEngine> engine_;
  const bool check_calls_;
  const int rank_;
  const int size_;
  CallCheck check_;
  std::shared_ptr<C10dPort> port_;
  std::shared_ptr<MessageMatcher> messages_;
  std::mutex mutex_;
  C10dEngine::Operation operation_;  // the one that is running or ran last
  int num_splits_ = 0;
  std::atomic<bool> left_{false};
};

}  // namespace accelerate_cpp::comm
