#include "torch_bridge/c10d_work.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "core/base/error.h"
#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {
namespace {

using Future = c10::ivalue::Future;
using FuturePointer = c10::intrusive_ptr<Future>;

FuturePointer future_of_tensors() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

// Common to all: a number, results, and no stream to synchronise with.
class NumberedWork : public ::c10d::Work {
 public:
  NumberedWork(::c10d::OpType type, std::uint64_t sequence, Tensors results)
      : Work(-1, type), sequence_(sequence), results_(std::move(results)) {}

  std::uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override {
    if (!isCompleted()) {
      throw InvalidArgument("the result of an operation is there when it has completed: call wait() first");
    }
    return results_;
  }

 protected:
  const Tensors& results() const { return results_; }

 private:
  const std::uint64_t sequence_;
  const Tensors results_;
};

class CompletedWork final : public NumberedWork {
 public:
  using NumberedWork::NumberedWork;

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  bool wait(std::chrono::milliseconds) override { return true; }
  FuturePointer getFuture() override {
    FuturePointer future = future_of_tensors();
    future->markCompleted(c10::IValue(results()));
    return future;
  }
};

class FailedWork final : public NumberedWork {
 public:
  FailedWork(::c10d::OpType type, std::exception_ptr error) : NumberedWork(type, 0, {}), error_(std::move(error)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return false; }
  std::exception_ptr exception() const override { return error_; }
  bool wait(std::chrono::milliseconds) override { std::rethrow_exception(error_); }
  FuturePointer getFuture() override {
    FuturePointer future = future_of_tensors();
    future->setError(error_);
    return future;
  }

 private:
  const std::exception_ptr error_;
};

class PendingWork final : public NumberedWork {
 public:
  PendingWork(::c10d::OpType type, std::uint64_t sequence, Tensors results, std::shared_ptr<Pending> pending,
              std::shared_ptr<const Transfer> transfer, Rethrow rethrow)
      : NumberedWork(type, sequence, std::move(results)),
        pending_(std::move(pending)),
        transfer_(std::move(transfer)),
        rethrow_(std::move(rethrow)) {}

  bool isCompleted() override { return pending_->poll(); }
  bool isSuccess() const override { return pending_->ended() && !pending_->error(); }
  std::exception_ptr exception() const override {
    const std::exception_ptr error = pending_->error();
    return error ? translated(error, rethrow_) : nullptr;
  }
  int sourceRank() const override { return transfer_ ? transfer_->source() : Work::sourceRank(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const Waiting waiting;
    try {
      pending_->wait(timeout.count() > 0 ? std::optional(Deadline::after(timeout)) : std::nullopt);
    } catch (...) {
      rethrow_();
    }
    return true;
  }

  FuturePointer getFuture() override {
    bool made = false;
    FuturePointer future;
    {
      const std::lock_guard lock(future_mutex_);
      made = !future_;
      future_ = made ? future_of_tensors() : future_;
      future = future_;
    }
    if (made) {
      // Captures no Work, so that a future does not keep alive what keeps it alive.
      pending_->then([future, results = results(), pending = pending_.get(), rethrow = rethrow_] {
        if (const std::exception_ptr error = pending->error()) {
          future->setError(translated(error, rethrow));
        } else {
          future->markCompleted(c10::IValue(results));
        }
      });
    }
    pending_->hurry();
    return future;
  }

 private:
  const std::shared_ptr<Pending> pending_;
  const std::shared_ptr<const Transfer> transfer_;
  const Rethrow rethrow_;
  std::mutex future_mutex_;
  FuturePointer future_;
};

class CoalescedWork final : public NumberedWork {
 public:
  explicit CoalescedWork(std::vector<WorkPointer> works)
      : NumberedWork(::c10d::OpType::COALESCED, 0, {}), works_(std::move(works)) {}

  bool isCompleted() override {
    // No short-circuit: each of them must make progress.
    return std::count_if(works_.begin(), works_.end(), [](const auto& work) { return !work->isCompleted(); }) == 0;
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const WorkPointer& work : works_) {
      if (const std::exception_ptr error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const Deadline deadline = timeout.count() > 0 ? Deadline::after(timeout) : Deadline::never();
    for (const WorkPointer& work : works_) {
      work->wait(timeout.count() > 0 ? std::max(deadline.remaining(), std::chrono::milliseconds(1)) : kNoTimeout);
    }
    return true;
  }
  Tensors result() override {
    Tensors all;
    for (const WorkPointer& work : works_) {
      const Tensors own = work->result();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  FuturePointer getFuture() override {
    FuturePointer future = future_of_tensors();
    if (works_.empty()) {
      future->markCompleted(c10::IValue(Tensors{}));
      return future;
    }
    const auto left = std::make_shared<std::atomic<std::size_t>>(works_.size());
    for (const WorkPointer& work : works_) {
      work->getFuture()->addCallback([future, left, works = works_](Future&) {
        if (left->fetch_sub(1) == 1) {
          conclude(*future, works);
        }
      });
    }
    return future;
  }

 private:
  static void conclude(Future& future, const std::vector<WorkPointer>& works) {
    Tensors all;
    for (const WorkPointer& work : works) {
      const FuturePointer part = work->getFuture();
      if (part->hasError()) {
        future.setError(part->exception_ptr());
        return;
      }
      const Tensors own = part->value().toTensorVector();
      all.insert(all.end(), own.begin(), own.end());
    }
    future.markCompleted(c10::IValue(std::move(all)));
  }

  const std::vector<WorkPointer> works_;
};

}  // namespace

std::exception_ptr translated(const std::exception_ptr& error, const Rethrow& rethrow) {
  try {
    try {
      std::rethrow_exception(error);
    } catch (...) {
      rethrow();
    }
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

WorkPointer completed_work(::c10d::OpType type, std::uint64_t sequence, Tensors results) {
  return c10::make_intrusive<CompletedWork>(type, sequence, std::move(results));
}

WorkPointer failed_work(::c10d::OpType type, std::exception_ptr error) {
  return c10::make_intrusive<FailedWork>(type, std::move(error));
}

WorkPointer pending_work(::c10d::OpType type, std::uint64_t sequence, Tensors results, std::shared_ptr<Pending> pending,
                         std::shared_ptr<const Transfer> transfer, Rethrow rethrow) {
  return c10::make_intrusive<PendingWork>(type, sequence, std::move(results), std::move(pending), std::move(transfer),
                                          std::move(rethrow));
}

WorkPointer coalesced_work(std::vector<WorkPointer> works) {
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

}  // namespace accelerate_cpp::comm
