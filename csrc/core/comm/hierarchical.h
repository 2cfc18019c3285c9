// A communicator over several hosts: shared memory inside each host, and rails between the hosts. A rail has one rank
// of every host and uses any engine that reaches them. Ranks of one host talk to each other within the host. In a large
// all_reduce every rail carries a slice, so that no rank does all the work of its host; other operations use the rail
// of the first ranks, the leaders.
//
// Before an operation all ranks compare what they ask for, first within each host, then along each rail. That costs one
// round trip, and a difference raises MismatchedCollective on all ranks. Any other error on any rank makes the group
// fail on all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/comm/call_check.h"
#include "core/comm/communicator.h"
#include "core/comm/first_failure.h"
#include "core/comm/host_layout.h"
#include "core/comm/message_matcher.h"
#include "core/comm/work_queue.h"

namespace accelerate_cpp::comm {

class Hierarchical final : public Communicator {
 public:
  struct Parts {
    std::shared_ptr<Communicator> inside;  // the ranks of this host, in the order of HostLayout::ranks_of
    // The ranks with this rank's index on every host, by host; null if some host has fewer ranks
    // (HostLayout::is_on_rail).
    std::shared_ptr<Communicator> rail;
    std::shared_ptr<Communicator> everyone;  // all ranks; what it carries crosses hosts
  };

  // `hooks` are asked for call sites; waiting is done by the parts.
  Hierarchical(HostLayout layout, Parts parts, WaitHooks hooks);
  ~Hierarchical() override;
  Hierarchical(const Hierarchical&) = delete;
  Hierarchical& operator=(const Hierarchical&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return layout_.size(); }
  const HostLayout& layout() const { return layout_; }

  void all_reduce(MemoryView data, Reduction reduction, const Call& call) override;
  void reduce(MemoryView data, int root, Reduction reduction, const Call& call) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                      const Call& call) override;
  void broadcast(MemoryView data, int root, const Call& call) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) override;
  void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                  const Call& call) override;
  void barrier(const Call& call) override;
  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Communicator> split(int color, int key, const Call& call) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  std::string name_of(int rank) const override { return hooks_.name_of(rank); }
  double cores_per_rank() const override { return parts_.inside->cores_per_rank(); }
  void leave() noexcept override;
  bool someone_has_left() override { return parts_.everyone->someone_has_left(); }
  std::vector<int> meet(const std::string& topic, const Call& call) override;
  void abort(const std::string& reason) noexcept override;

 private:
  using Action = std::function<void()>;
  // Elements [begin, begin + count) of the operands of every rank, as far as they have them.
  struct Piece {
    std::size_t begin;
    std::size_t count;
  };

  // The reduction inside each host, and the one between the hosts.
  struct TwoReductions {
    Reduction inside;
    ReduceOp between;
  };
  TwoReductions two_levels(const Reduction& reduction) const;

  int host() const { return layout_.host_of(rank_); }
  const std::vector<int>& own_ranks() const { return layout_.ranks_of(host()); }
  bool is_leader() const { return layout_.is_leader(rank_); }

  // Runs `body` as one operation: one at a time in this process, after the check, and with failures reported to all
  // ranks.
  void run(const CallRecord& record, const Call& call, const Action& body);
  void run_alone(const CallRecord& record, const Action& action);
  std::vector<int> check(const CallRecord& record, const Call& call);
  // Runs an operation of `inside` or of the rail. Its errors tell which.
  void inside(const Action& action) const;
  void between(const Action& action) const;
  void check_usable(const std::string& what) const;
  void fail(const std::string& reason) noexcept;
  std::string all_gather_bytes(const std::string& own, const Call& call) const;
  bool agree(const CallDigest& own, const Call& call) const;

  // The inner call has operands of other shapes.
  static Call part_of(const Call& call) { return {call.deadline, {}, call.location}; }
  // The entries of `parts` for the ranks of this host; and `parts` with those entries empty.
  template <class View>
  std::vector<View> of_own_host(const std::vector<View>& parts) const;
  template <class View>
  std::vector<View> of_other_hosts(std::vector<View> parts, DType dtype) const;

  void all_reduce_by_leaders(MemoryView data, const TwoReductions& reductions, const Call& call) const;
  void all_reduce_by_rails(MemoryView data, const TwoReductions& reductions, const Call& call);
  std::vector<MemoryView> slices_for_rails(MemoryView piece) const;
  void send_from_leader(MemoryView from, MemoryView to, int root, const Call& call) const;
  std::vector<Piece> pieces_of(const std::vector<ConstMemoryView>& parts) const;
  MemoryView scratch(std::size_t count, DType dtype);
  // Memory for `piece` of `parts`: one block per host, and in it a place for each of its ranks, in order.
  struct Blocks {
    MemoryView whole;
    std::vector<MemoryView> of_host;
    std::vector<MemoryView> of_rank;
  };
  Blocks blocks(const std::vector<ConstMemoryView>& parts, const Piece& piece);
  void gather_from_hosts(const std::vector<MemoryView>& outputs, const Piece& piece, const Call& call);
  void reduce_scatter_piece(const std::vector<ConstMemoryView>& inputs, MemoryView output, const Reduction& reduction,
                            const Piece& piece, const Call& call);

  const HostLayout layout_;
  const Parts parts_;
  const int rank_;
  const OwnerProcess process_;
  const WaitHooks hooks_;
  CallCheck check_;
  std::shared_ptr<MessageMatcher> messages_;
  std::mutex mutex_;
  std::shared_ptr<Buffer> scratch_;  // of inside
  std::size_t scratch_bytes_ = 0;
  WorkQueue rail_queue_;  // what the rail does while the host goes on
  FirstFailure failure_;
};

}  // namespace accelerate_cpp::comm
