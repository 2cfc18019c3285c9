// Collective and point-to-point operations of a fixed set of ranks.
//
// Collectives: every rank calls the same ones in the same order, with the same dtype and with operands of the same
// shape where they correspond; anything else raises MismatchedCollective on every rank. Calls return when the result is
// in place. Operands may not overlap unless a method says so. One thread at a time (calls from several threads are
// serialised).
//
// Point-to-point: from any thread, in any order, independent of collectives.
//
// A dead or failed peer raises PeerLost, a passed deadline Timeout; after either the communicator stays unusable and
// says why. After a MismatchedCollective or the withdrawal of a rank it may stay usable: interruptions() tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/cores.h"
#include "core/base/memory_view.h"
#include "core/comm/call.h"
#include "core/comm/options.h"

namespace accelerate_cpp::comm {

// Memory from Communicator::allocate; collectives on it need no staging copy. Freed when the last reference is dropped.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() = 0;
};

// A posted send or receive. Its operand must stay valid until it has ended; dropping the Transfer does not cancel it.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Whether it has ended, well or not; makes progress. Never blocks or throws.
  virtual bool poll() noexcept = 0;

  // Returns when it is complete; throws why it failed. A Timeout of wait() alone leaves it posted.
  virtual void wait(Deadline deadline) = 0;

  // The rank that the data came from, once a receive is complete.
  virtual int source() const = 0;
};

class Communicator {
 public:
  static constexpr int kAnySource = -1;

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What messages call a rank: in a group that is a part of another, by its number there.
  virtual std::string name_of(int rank) const { return "rank " + std::to_string(rank); }

  // In place: afterwards `data` holds the reduction over all ranks, bitwise equal on all of them.
  virtual void all_reduce(MemoryView data, Reduction reduction, const Call& call) = 0;
  // The same on memory of the host, where all_reduce() works on that of a device.
  virtual void all_reduce_on_host(MemoryView data, ReduceOp op, const Call& call) { all_reduce(data, op, call); }

  // As all_reduce, but only the `data` of `root` holds the reduction; that of the other ranks is unchanged.
  virtual void reduce(MemoryView data, int root, Reduction reduction, const Call& call) = 0;

  // inputs[r] is this rank's contribution to rank r; `output` receives the reduction of the contributions to this rank.
  // inputs[r].count is the same on all ranks and equals the count of rank r's output; it may differ between r. `output`
  // may be inputs[rank()].
  virtual void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                              const Call& call) = 0;

  // `data` of `root` is copied to all ranks.
  virtual void broadcast(MemoryView data, int root, const Call& call) = 0;

  // outputs[r] receives the input of rank r; counts may differ between ranks. `input` may be outputs[rank()].
  virtual void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) = 0;

  // As all_gather, on `root` alone; elsewhere `outputs` is empty.
  virtual void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) = 0;

  // inputs[r] of `root` is copied to rank r's `output`; elsewhere `inputs` is empty. Counts may differ between ranks.
  // `output` may be inputs[root].
  virtual void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) = 0;

  // inputs[r] is copied to outputs[this rank] of rank r; counts may differ between pairs, 0 included.
  virtual void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                          const Call& call) = 0;

  // Returns when every rank has entered it.
  virtual void barrier(const Call& call) = 0;

  // Posts `data` for the receive of `destination` with the same tag. Messages with equal tags arrive in order.
  virtual std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag,
                                         const Call& call) = 0;

  // Posts `data` for a message from `source` (or kAnySource) with this tag. A message of another dtype or count raises
  // MismatchedCollective.
  virtual std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) = 0;

  // Collective: a communicator of the ranks that pass the same `color`, in the order of `key`, then of rank. Returns
  // null on ranks that pass a negative color.
  virtual std::shared_ptr<Communicator> split(int color, int key, const Call& call) = 0;

  // Memory on which this communicator works without a staging copy. Not collective. Throws SystemFailure when there is
  // not enough.
  virtual std::shared_ptr<Buffer> allocate(std::size_t size_bytes) = 0;

  // Collective: zero-filled memory of `size_bytes` that every rank maps, gone with its last mapping. Only for ranks
  // that share a host; others get InvalidArgument. Throws SystemFailure on all ranks when there is not enough.
  virtual std::shared_ptr<Buffer> window(std::size_t size_bytes, const Call& call);

  // Cores per rank of this host, as far as known.
  virtual double cores_per_rank() const { return usable_cores() / size(); }

  // Tells peers that this rank has left the group and need not be waited for. Does nothing if nobody can be told.
  virtual void leave() noexcept {}

  // Whether some rank is known to have left. Does not wait.
  virtual bool someone_has_left() { return false; }

  // Waits until it is known which ranks are in a meeting on this topic, and returns them in order. A rank that is in a
  // collective or in a meeting on another topic, or that waits for such a rank, is not, and notices nothing; neither is
  // one that has left. A rank that has died or failed might have come, so it raises PeerLost, but only the first time,
  // since the caller then knows. Of meetings on several topics, the one that the lowest rank is in goes first. Where
  // ranks cannot see what others call, all are expected, as in a barrier.
  virtual std::vector<int> meet(const std::string& topic, const Call& call);

  // How many collectives have ended in an error that all ranks raised alike, and that left the communicator usable.
  // Equal on all ranks between collectives.
  virtual std::uint64_t interruptions() const noexcept { return 0; }

  // This rank takes no part in the collective that the others are in or call next, which raises PeerLost with `reason`
  // on them and counts as an interruption. A communicator that cannot do that is aborted. Waits for ranks that are
  // still in earlier collectives.
  virtual void withdraw(const std::string& reason, const Call&) { abort(reason); }
  // Whether it stays usable then.
  virtual bool can_withdraw() const { return false; }

  // Makes every rank's current and later operations raise PeerLost with `reason`. Never blocks or throws.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace accelerate_cpp::comm
