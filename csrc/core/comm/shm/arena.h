// The shared memory of one rank in one group, and its view of the memory of its peers.
//
// A pointer into the arena is named to peers as (rank, segment, offset). Segments are announced to every peer on
// creation; peers map them when they are first referred to. Memory of the process that belongs to no group becomes part
// of the arena when find() first meets it. Thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/base/background.h"
#include "core/comm/shm/channel.h"
#include "core/comm/shm/segment.h"

namespace accelerate_cpp::comm {

// A place in a rank's arena.
struct ArenaReference {
  std::uint32_t segment;
  std::uint64_t offset_bytes;
};

class Arena {
 public:
  // `channels` as from connect_mesh: one per rank, empty for this rank.
  explicit Arena(std::vector<std::unique_ptr<Channel>> channels);

  struct Block {
    std::uint32_t id;
    std::shared_ptr<Segment> segment;
  };

  // A new segment of this rank, announced to all peers once `prepare` has run. The caller drops it with release(), or
  // lets an OwnedBlock do so.
  Block create(std::size_t size_bytes, const std::function<void(std::byte* data)>& prepare = [](std::byte*) {});

  // Peers may unmap the segment; find() no longer sees it. Once no rank uses it any more, its memory goes back to the
  // system although forked children of the ranks (data-loader workers) still have it mapped; they see zeros then.
  void release(std::uint32_t id);

  // As release(), but nobody gives the memory back before the last process has unmapped it: ranks, and their forked
  // children, may use it for as long as they hold the segment, with or without the group.
  void disown(std::uint32_t id);

  // Where [data, data + size_bytes) lies in this rank's arena, or nothing. Memory of the process whose descriptor has
  // been given up (SharedSegments) is found only by the arenas that had met it before.
  std::optional<ArenaReference> find(const void* data, std::size_t size_bytes);

  // The segment `id` of `peer`, or null while it has not arrived.
  std::shared_ptr<Segment> of_peer(int peer, std::uint32_t id);

  // As of_peer, waiting for the segment at most `limit`.
  std::shared_ptr<Segment> await_of_peer(int peer, std::uint32_t id, std::chrono::milliseconds limit);

  // Sends what is still queued and receives what has arrived, so that peers can release memory. Never blocks.
  void poll();

  // Whether the peer has been told of all segments; one that does not read cannot be told of more than some hundreds.
  bool has_told(int peer);

  // Waits until all peers have been told of all segments, or closed their ends, at most `limit`: one that does nothing
  // does not read.
  void tell_all(std::chrono::milliseconds limit) noexcept;

  // Whether the peer has closed its end; up to date after poll().
  bool peer_closed(int peer) const;

  // Process id of the peer as seen from here; 0 when it is not visible.
  pid_t peer_pid(int peer) const;

 private:
  struct Peer {
    std::unique_ptr<Channel> channel;
    using Arrived = std::map<std::uint32_t, int>;
    Arrived arrived;  // descriptors not mapped yet
    std::map<std::uint32_t, std::shared_ptr<Segment>> mapped;
    // Segments that the peer has released and this process still uses.
    std::map<std::uint32_t, std::weak_ptr<Segment>> to_let_go;
    ~Peer();
  };

  // An own segment that has been released, and how many peers have not let go of it.
  struct Released {
    std::shared_ptr<Segment> segment;
    std::set<const Peer*> users;
  };

  struct Adopted {
    std::uint32_t id;
    std::weak_ptr<Segment> segment;
  };

  // Nothing when the segment has no descriptor any more.
  std::optional<std::uint32_t> announce_locked(const std::shared_ptr<Segment>& segment);
  void release_locked(std::uint32_t id);
  std::optional<std::uint32_t> adopt_locked(const std::shared_ptr<Segment>& segment);
  // Tells peers to unmap the segments of the process that nobody uses any more.
  void release_expired_locked();
  // Tells peers which segments this process no longer uses, and gives back memory that nobody uses.
  void let_go_locked();
  void flush_locked();
  void drain_locked(Peer& peer);
  static std::shared_ptr<Segment> map_arrived(Peer& owner, Peer::Arrived::iterator arrived);

  const OwnerProcess process_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  std::uint32_t next_id_ = 0;
  std::map<std::uint32_t, std::shared_ptr<Segment>> own_;
  std::map<std::uint32_t, Released> released_;
  std::map<const std::byte*, std::uint32_t> by_address_;
  std::map<const Segment*, Adopted> adopted_;     // segments of the process that peers have been told of
  std::vector<std::shared_ptr<Segment>> unsent_;  // still to be sent to some peer; their descriptors are pinned
};

// A new block of an arena that is released with this object.
class OwnedBlock {
 public:
  OwnedBlock(std::shared_ptr<Arena> arena, std::size_t size_bytes)
      : arena_(std::move(arena)), block_(arena_->create(size_bytes)) {}
  ~OwnedBlock() { arena_->release(block_.id); }
  OwnedBlock(const OwnedBlock&) = delete;
  OwnedBlock& operator=(const OwnedBlock&) = delete;

  std::uint32_t id() const { return block_.id; }
  const std::shared_ptr<Segment>& segment() const { return block_.segment; }

 private:
  std::shared_ptr<Arena> arena_;
  Arena::Block block_;
};

}  // namespace accelerate_cpp::comm
