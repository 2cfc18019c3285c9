// The messages from one rank to one other. Each direction of each pair has an NCCL communicator and a stream of its
// own, made when the first message is posted on both sides: so transfers wait neither for collectives nor for each
// other.
//
// NCCL knows no tags and no sizes: a receive takes what was sent next. So every message is a header and then the data.
// The receiver reads the header, finds the receive that was posted for its tag, and only then lets the data come: into
// the operand; or, when there is none yet, into memory of the channel, from where a later receive copies it.
//
// Channels are not thread-safe; the device must be current. They advance only when told to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "core/base/memory_view.h"
#include "core/comm/communicator.h"
#include "core/comm/nccl/cuda_objects.h"
#include "core/comm/nccl/nccl_group.h"
#include "core/comm/nccl/nccl_link.h"

namespace accelerate_cpp::comm {

// One posted send or receive.
struct Posting {
  // `ready` is recorded on the caller's stream: the operand may be touched when it has passed.
  Posting(NcclGroup& group, MemoryView data_, int source_, std::uint64_t tag_, const Call& call);

  // Ends it; the first end counts. Any thread may look at `ended`, and then at `error`.
  void end(std::exception_ptr why = nullptr);
  // "100 float32 with tag 7".
  std::string describe() const;

  MemoryView data;  // of a send: only read
  int source;       // the rank that the data comes from
  std::uint64_t tag;
  Deadline deadline;
  std::string location;
  DeviceEvent ready;
  std::exception_ptr error;
  std::atomic<bool> ended{false};
};

using SharedPosting = std::shared_ptr<Posting>;

class NcclChannel {
 public:
  virtual ~NcclChannel() = default;
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  virtual void post(SharedPosting posting) = 0;

  // Does what can be done without waiting. Throws what NCCL or CUDA report.
  virtual void advance() = 0;

  // What was posted and has not ended.
  virtual std::list<SharedPosting> pending() const = 0;

  int peer() const { return group_.rank() == source_ ? destination_ : source_; }

  // As those of NcclLink.
  void abort() noexcept;
  void retire() noexcept;

 protected:
  // Travels ahead of the data.
  struct Header {
    std::uint64_t tag;
    std::uint64_t count;
    std::uint64_t dtype;
    std::uint64_t unused;  // to 32 bytes
  };

  NcclChannel(NcclGroup& group, int source, int destination);

  // True once both ranks have joined.
  bool connect();
  // To the other rank of the channel.
  void send(const void* data, std::size_t size_bytes);
  void receive(void* data, std::size_t size_bytes);

  NcclGroup& group_;
  std::unique_ptr<NcclLink> link_;
  CudaMemory device_header_;
  CudaMemory header_;

 private:
  std::optional<NcclUniqueId> find_id();

  int source_;
  int destination_;
  bool connected_ = false;
  std::chrono::steady_clock::time_point next_look_{};
};

class OutgoingChannel final : public NcclChannel {
 public:
  OutgoingChannel(NcclGroup& group, int destination) : NcclChannel(group, group.rank(), destination) {}
  void post(SharedPosting posting) override { queue_.push_back(std::move(posting)); }
  void advance() override;
  std::list<SharedPosting> pending() const override { return {queue_.begin(), queue_.end()}; }

 private:
  enum class Step { kIdle, kHeader, kData, kEnd };

  bool take_step(Posting& front);

  std::deque<SharedPosting> queue_;  // the front one is under way
  Step step_ = Step::kIdle;
};

class IncomingChannel final : public NcclChannel {
 public:
  IncomingChannel(NcclGroup& group, int source);
  void post(SharedPosting posting) override;
  void advance() override;
  std::list<SharedPosting> pending() const override;

 private:
  enum class Step { kIdle, kHeader, kReadHeader, kData, kEnd };

  // A message that came before the receive for it was posted.
  struct Early {
    Header header;
    std::unique_ptr<CudaMemory> data;
  };

  // An early message on its way into the operand of the receive that was posted for it at last.
  struct Copy {
    SharedPosting posting;
    std::unique_ptr<CudaMemory> data;
    std::unique_ptr<DeviceEvent> end;
  };

  bool take_step();
  void finish_copies();
  // The first waiting receive with the tag, which then waits no more; null when there is none.
  SharedPosting take_waiting(std::uint64_t tag);
  void let_data_come();
  void finish_message();
  std::unique_ptr<CudaMemory> memory_for(std::size_t size_bytes);
  void deliver(const SharedPosting& posting, const Header& header);
  static bool fits(const Posting& posting, const Header& header);

  // A tag is never in both: a receive takes an early message when it is posted, a message a waiting receive when it
  // comes.
  std::list<SharedPosting> waiting_;  // in the order of posting
  std::list<Early> early_;            // in the order of arrival

  DeviceStream copy_stream_;  // apart from the link's, where the receive of a header may be waiting
  std::list<Copy> copies_;
  std::list<std::unique_ptr<CudaMemory>> spare_;

  Step step_ = Step::kIdle;
  Header current_{};                     // the message under way
  SharedPosting target_;                 // the receive that it is for; null: nobody's yet
  std::unique_ptr<CudaMemory> scratch_;  // where its data goes, unless into the target's operand
};

}  // namespace accelerate_cpp::comm
