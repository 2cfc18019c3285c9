// Options of collectives, and the hooks that they call while they wait.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace accelerate_cpp::comm {

// kPreMulSum: every rank's values are multiplied by its own factor, then added.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct, kPreMulSum, kBitAnd, kBitOr, kBitXor };

// "sum", "avg", …, for messages.
const char* name(ReduceOp op);

struct Reduction {
  ReduceOp op;
  double factor;  // this rank's, for kPreMulSum

  Reduction(ReduceOp op_, double factor_ = 1.0) : op(op_), factor(factor_) {}  // NOLINT(google-explicit-constructor)
};

// Called from inside long waits; throws when the caller wants to stop waiting (Ctrl-C).
using InterruptProbe = std::function<void()>;

struct WaitHooks {
  InterruptProbe probe = [] {};

  // Where the user's program called the operation, the text of a CallSite; asked for by the thread that called, once a
  // wait has become long or a mismatch is to be reported.
  std::function<std::string()> call_site = [] { return std::string(); };

  // Takes one sentence when a wait has lasted for `warn_after`.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  std::chrono::milliseconds warn_after{30000};

  // By which numbers messages call the ranks of a group that is a part of another; empty: by those in the group.
  std::vector<int> numbers;

  // What is no rank of the group, as an argument may be, stays as it is.
  int number_of(int rank) const {
    return rank < 0 || static_cast<std::size_t>(rank) >= numbers.size() ? rank
                                                                        : numbers[static_cast<std::size_t>(rank)];
  }
  std::string name_of(int rank) const { return "rank " + std::to_string(number_of(rank)); }

  // For a group of `members` of this group, in their order: its messages call them as those of this group do.
  WaitHooks among(const std::vector<int>& members) const {
    WaitHooks hooks = *this;
    hooks.numbers.clear();
    for (const int member : members) {
      hooks.numbers.push_back(number_of(member));
    }
    return hooks;
  }
};

}  // namespace accelerate_cpp::comm
