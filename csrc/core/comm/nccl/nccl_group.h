// What all parts of one NcclCommunicator share: which rank it is, how it waits, and whether it has failed.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/comm/nccl/group_board.h"
#include "core/comm/nccl/nccl_link.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

struct NcclOptions {
  int device = 0;  // the GPU of this rank; no two ranks may have the same

  // The stream (a cudaStream_t) on which the caller's earlier work on the operands was put: an operation starts after
  // that work. Null stands for the default stream.
  std::function<void*()> caller_stream = [] { return nullptr; };

  // Begins all keys in the store; two groups on one store need different ones.
  std::string prefix = "nccl";

  // Files of the libraries; empty: searched, see nvidia_library_names(), also beside the folder `beside`.
  std::string nccl_path;
  std::string cudart_path;
  std::string beside;

  WaitHooks hooks;

  // After each operation the ranks compare what they asked for; see NcclCommunicator.
  bool check_calls = true;

  // How long an operation may take before the ranks look at each other's calls in the store.
  std::chrono::milliseconds stall_after{500};
};

// Thread-safe.
class NcclGroup {
 public:
  using Failure = GroupBoard::Failure;

  NcclGroup(NcclContext context, GroupBoard board, NcclOptions options, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const NcclContext& context() const { return context_; }
  GroupBoard& board() { return board_; }
  const NcclOptions& options() const { return options_; }
  CudaStream caller_stream() const { return static_cast<CudaStream>(options_.caller_stream()); }

  // "rank 0 of 2 (cuda:0)", for messages.
  std::string place() const;

  // Ends the group in this process, and tells the other ranks unless they told us. The first failure stays. Never
  // throws.
  void fail(const Failure& failure, bool tell_others = true) noexcept;
  std::optional<Failure> failure() const;

  // Throws PeerLost in a forked child.
  void check_not_forked(const std::string& what) const;

  // Throws PeerLost with the reason once the group has failed, or in a forked child; `what` was about to be done.
  void check_usable(const std::string& what) const;

 private:
  NcclContext context_;
  GroupBoard board_;
  NcclOptions options_;
  int rank_;
  int size_;
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
};

}  // namespace accelerate_cpp::comm
