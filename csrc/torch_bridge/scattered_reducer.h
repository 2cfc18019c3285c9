// Averages gradients of whole weights over ranks of which each keeps the averages of its rows alone, while autograd
// computes them.
//
// A hook behind each gradient accumulator copies the gradient into the buckets of a ScatteredExchange, in one order on
// all ranks, and frees it, so that a rank never holds more than its rows, some buckets, and the gradients that arrived
// before it was their turn. A weight that is larger than a bucket is divided among several.
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054).
//
// When a pass begins, and where averages go, is up to the caller.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/background.h"
#include "core/base/deadline.h"
#include "core/grad/scattered_exchange.h"
#include "torch_bridge/c10d_scattered_exchange.h"
#include "torch_bridge/parameter_ownership.h"
#include "torch_bridge/pass_failure.h"

namespace accelerate_cpp::grad {

// A dense leaf on the CPU, whose first dimension the ranks share out in equal parts; the last ones may get less.
struct ScatteredWeight {
  std::string name;  // for messages
  at::Tensor whole;
};

struct ScatteredReducerOptions {
  std::size_t bucket_bytes;  // of all ranks together
  bool overlaps;             // as in C10dScatteredExchange
};

// Where the averages of the rows of a weight go: a contiguous tensor of their dtype.
struct RowsOfWeight {
  at::Tensor rows;
  bool adds = false;  // to what is there
};

class ScatteredReducer : public std::enable_shared_from_this<ScatteredReducer> {
 public:
  // As in GradientReducer.
  using Rethrow = std::function<void()>;
  // Called when a gradient arrives and no pass has begun; calls begin().
  using Begin = std::function<void()>;

  // Collective. `weights` are in the same order on every rank, each with a gradient that is to be averaged. `ranks`
  // share out the rows; `replicas` have the same rows, and are null where there are none.
  static std::shared_ptr<ScatteredReducer> create(const BackendPointer& ranks, BackendPointer replicas,
                                                  std::vector<ScatteredWeight> weights,
                                                  const ScatteredReducerOptions& options, Begin begin, Rethrow rethrow);
  ScatteredReducer(const ScatteredReducer&) = delete;
  ScatteredReducer& operator=(const ScatteredReducer&) = delete;

  // Whether passes average; if not, gradients are left where autograd puts them, and the next pass that averages takes
  // them in.
  void set_synchronizing(bool synchronizing) { ownership_->set_synchronizing(synchronizing); }
  bool synchronizing() const { return ownership_->synchronizing(); }

  // What ends a pass without a call of expect() is the end of the pass in which the first gradient arrived; with
  // reentrant checkpointing that may be a nested one, and an InvalidArgument is thrown.
  void expect();

  // A pass begins, which ends by finish() or fail(). Averages go into `rows`, by weight. If it is `deferred`, nothing
  // is handed to the other ranks before finish().
  void begin(std::vector<RowsOfWeight> rows, bool deferred);

  // Returns when the averages are there: for each weight, whether some rank has a gradient for it. Where none has, the
  // averages are zeros. Empty where no pass has begun, or it does not average.
  std::vector<bool> finish();

  // The pass has ended in an exception, here or before it came to this model. The other ranks raise, too, and get to
  // know the `reason`, unless only the end of their communicator could make them.
  void fail(const std::string& reason) noexcept;

 private:
  struct Weight {
    ScatteredWeight given;
    std::size_t share = 0;  // elements of the rows of one rank; the last ones have fewer, or none
    std::vector<std::pair<std::size_t, std::size_t>> places;  // buckets, and slots there, of its pieces, in order
    bool awaited = false;                                     // in this pass
    bool arrived = false;
  };
  // Elements [begin, begin + count) of each rank's rows of a weight, which have a place in a bucket.
  struct Piece {
    std::size_t weight;
    std::size_t begin;
    std::size_t count;
    std::size_t offset;  // in the block of each rank
  };

  ScatteredReducer(const BackendPointer& ranks, BackendPointer replicas, std::vector<ScatteredWeight> weights,
                   const ScatteredReducerOptions& options, Begin begin, Rethrow rethrow);

  void own_weights();
  std::vector<ScatteredBucket> plan();
  void take_rows(std::vector<RowsOfWeight> rows);
  void on_gradient(std::size_t weight);
  // Puts what belongs there of a weight into the next bucket.
  void fill_next_with(const Weight& weight);
  bool is_filled(std::size_t slot) const { return memory_.data != nullptr && filled_[slot]; }
  // Copies the gradient of a weight, if it has one, or zeros into the next bucket.
  void fill(std::size_t slot);
  void prepare_for_copy(const Weight& weight);
  // Hands the next bucket to the other ranks, with what has arrived.
  void publish();
  Deadline deadline() const { return Deadline::after(timeout_); }

  const ScatteredReducerOptions options_;
  const std::chrono::milliseconds timeout_;  // of waits in shared memory; other backends have their own
  const Begin begin_;
  const Rethrow rethrow_;
  const OwnerProcess process_;
  std::vector<Weight> weights_;
  std::shared_ptr<ParameterOwnership> ownership_;
  std::vector<std::vector<Piece>> pieces_;  // by bucket
  std::size_t num_ranks_;
  std::size_t rank_;
  std::deque<PassFailure> failures_;  // of the groups of ranks that can be told
  std::unique_ptr<ScatteredExchange> exchange_;

  // The current pass.
  bool caller_tells_ = false;  // how it ends
  bool in_pass_ = false;
  bool deferred_ = false;
  int graph_task_ = -1;
  std::vector<RowsOfWeight> rows_;
  std::vector<std::uint8_t> used_;    // by weight
  std::vector<std::size_t> missing_;  // weights that each bucket still waits for
  std::size_t next_ = 0;              // bucket to be filled
  MemoryView memory_{};               // of that one, once it is open
  std::vector<bool> filled_;          // its slots
};

}  // namespace accelerate_cpp::grad
