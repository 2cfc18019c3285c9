// Sends and receives of one rank. A send has ended when its data has left the operand, which may be only after the
// receive for it was posted. Transfers advance during any call of the communicator or of one of its transfers, by
// whichever thread makes it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/nccl/nccl_channel.h"
#include "core/comm/nccl/nccl_group.h"

namespace accelerate_cpp::comm {

// Thread-safe.
class NcclPointToPoint : public std::enable_shared_from_this<NcclPointToPoint> {
 public:
  explicit NcclPointToPoint(std::shared_ptr<NcclGroup> group);

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call);
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call);

  // Advances all transfers. Returns at once when another thread is doing so, or when none is pending.
  void progress() noexcept;

  // Ends all channels; a transfer that has not ended is a failure, also for the other ranks. Called once, last.
  void close() noexcept;

  NcclGroup& group() { return *group_; }

 private:
  using Channels = std::map<int, std::unique_ptr<NcclChannel>>;  // by the other rank

  template <class Channel>
  std::shared_ptr<Transfer> post(Channels& channels, int peer, int source, MemoryView data, std::uint64_t tag,
                                 const Call& call, const std::string& title);
  void advance();
  void expire(Posting& posting, int peer);
  std::vector<NcclChannel*> channels() const;
  void abort_all() noexcept;
  void end_all(const std::exception_ptr& error) noexcept;

  std::shared_ptr<NcclGroup> group_;
  std::mutex mutex_;
  Channels outgoing_;
  Channels incoming_;
  std::atomic<std::size_t> pending_{0};  // transfers that had not ended at the last look
  std::chrono::steady_clock::time_point next_look_{};
};

}  // namespace accelerate_cpp::comm
