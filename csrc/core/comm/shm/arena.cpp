#include "core/comm/shm/arena.h"

#include <unistd.h>

#include <iterator>
#include <thread>
#include <utility>

#include "core/base/deadline.h"
#include "core/base/open_files.h"
#include "core/comm/shm/shared_segments.h"

namespace accelerate_cpp::comm {
namespace {

// The most segments of one peer that wait for their first use as open descriptors. Beyond that the oldest is mapped,
// which frees its descriptor.
constexpr std::size_t kUnmappedDescriptors = 4;
constexpr std::chrono::milliseconds kPause{1};

}  // namespace

Arena::Peer::~Peer() {
  for (const auto& [id, descriptor] : arrived) {
    ::close(descriptor);
  }
}

Arena::Arena(std::vector<std::unique_ptr<Channel>> channels) : peers_(channels.size()) {
  for (std::size_t r = 0; r < channels.size(); ++r) {
    peers_[r].channel = std::move(channels[r]);
  }
}

std::optional<std::uint32_t> Arena::announce_locked(const std::shared_ptr<Segment>& segment) {
  if (!segment->pin_descriptor()) {
    return std::nullopt;
  }
  const std::uint32_t id = next_id_++;
  for (const Peer& peer : peers_) {
    if (peer.channel) {
      peer.channel->announce(id, segment->descriptor());
    }
  }
  unsent_.push_back(segment);
  flush_locked();
  return id;
}

void Arena::release_locked(std::uint32_t id) {
  for (const Peer& peer : peers_) {
    if (peer.channel) {
      peer.channel->release(id);
    }
  }
  flush_locked();
}

Arena::Block Arena::create(std::size_t size_bytes, const std::function<void(std::byte* data)>& prepare) {
  std::shared_ptr<Segment> segment = Segment::create(size_bytes);
  prepare(segment->data());
  const std::lock_guard lock(mutex_);
  const std::uint32_t id = announce_locked(segment).value();
  segment->close_descriptor();  // once all have been sent it
  own_[id] = segment;
  by_address_[segment->data()] = id;
  return {id, std::move(segment)};
}

void Arena::release(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(id);
  if (found == own_.end()) {
    return;
  }
  by_address_.erase(found->second->data());
  Released& released = released_[id];
  released.segment = std::move(found->second);
  for (const Peer& peer : peers_) {
    if (peer.channel) {
      released.users.insert(&peer);
    }
  }
  own_.erase(found);
  release_locked(id);
  let_go_locked();
}

void Arena::disown(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(id);
  if (found == own_.end()) {
    return;
  }
  by_address_.erase(found->second->data());
  own_.erase(found);
  release_locked(id);
}

void Arena::let_go_locked() {
  if (process_.forked()) {
    return;  // a forked child must not empty the memory of its parent
  }
  for (Peer& peer : peers_) {
    std::erase_if(peer.to_let_go, [&peer](const auto& entry) {
      // Ranks that are threads share the owner's mapping, which does not expire before the owner has let go.
      const bool unused = entry.second.expired() || peer.channel->peer_pid() == ::getpid();
      if (unused) {
        peer.channel->let_go(entry.first);
      }
      return unused;
    });
  }
  for (auto entry = released_.begin(); entry != released_.end();) {
    Released& released = entry->second;
    std::erase_if(released.users, [](const Peer* peer) { return peer->channel->closed(); });
    const bool unused = released.users.empty() && released.segment.use_count() == 1;
    if (unused) {
      released.segment->discard();
    }
    entry = unused ? released_.erase(entry) : std::next(entry);
  }
}

void Arena::release_expired_locked() {
  for (auto entry = adopted_.begin(); entry != adopted_.end();) {
    const bool gone = entry->second.segment.expired();
    if (gone) {
      release_locked(entry->second.id);
    }
    entry = gone ? adopted_.erase(entry) : std::next(entry);
  }
}

std::optional<std::uint32_t> Arena::adopt_locked(const std::shared_ptr<Segment>& segment) {
  if (const auto known = adopted_.find(segment.get());
      known != adopted_.end() && known->second.segment.lock() == segment) {
    return known->second.id;
  }
  release_expired_locked();
  const std::optional<std::uint32_t> id = announce_locked(segment);
  if (id) {
    adopted_[segment.get()] = {*id, segment};
  }
  return id;
}

std::optional<ArenaReference> Arena::find(const void* data, std::size_t size_bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto* const begin = static_cast<const std::byte*>(data);
    const auto after = by_address_.upper_bound(begin);
    if (after != by_address_.begin()) {
      const auto& [start, id] = *std::prev(after);
      const auto offset = static_cast<std::size_t>(begin - start);
      const std::size_t segment_bytes = own_.at(id)->size_bytes();
      if (offset <= segment_bytes && size_bytes <= segment_bytes - offset) {
        return ArenaReference{id, offset};
      }
    }
  }
  const SharedSegments::Found shared = SharedSegments::of_process().find(data, size_bytes);
  if (!shared.segment) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const std::optional<std::uint32_t> id = adopt_locked(shared.segment);
  return id ? std::optional(ArenaReference{*id, shared.offset_bytes}) : std::nullopt;
}

std::shared_ptr<Segment> Arena::of_peer(int peer, std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  Peer& owner = peers_.at(static_cast<std::size_t>(peer));
  const auto known = [&] {
    const auto found = owner.mapped.find(id);
    return found == owner.mapped.end() ? nullptr : found->second;
  };
  if (std::shared_ptr<Segment> segment = known()) {
    return segment;
  }
  drain_locked(owner);
  let_go_locked();
  flush_locked();
  if (std::shared_ptr<Segment> segment = known()) {  // mapped as it arrived
    return segment;
  }
  const auto arrived = owner.arrived.find(id);
  if (arrived == owner.arrived.end()) {
    return nullptr;
  }
  return map_arrived(owner, arrived);
}

std::shared_ptr<Segment> Arena::map_arrived(Peer& owner, Peer::Arrived::iterator arrived) {
  const auto [id, descriptor] = *arrived;
  owner.arrived.erase(arrived);
  return owner.mapped[id] = Segment::map(descriptor);
}

std::shared_ptr<Segment> Arena::await_of_peer(int peer, std::uint32_t id, std::chrono::milliseconds limit) {
  std::shared_ptr<Segment> segment = of_peer(peer, id);
  if (!segment) {
    peers_.at(static_cast<std::size_t>(peer)).channel->wait_readable(limit);
    segment = of_peer(peer, id);
  }
  return segment;
}

void Arena::poll() {
  const std::lock_guard lock(mutex_);
  release_expired_locked();
  for (Peer& peer : peers_) {
    if (peer.channel) {
      drain_locked(peer);
    }
  }
  let_go_locked();
  flush_locked();
}

bool Arena::has_told(int peer) {
  const std::lock_guard lock(mutex_);
  return peers_.at(static_cast<std::size_t>(peer)).channel->flush();
}

void Arena::tell_all(std::chrono::milliseconds limit) noexcept {
  const Deadline deadline = Deadline::after(limit);
  try {
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        flush_locked();
        if (unsent_.empty() || deadline.expired()) {
          return;
        }
      }
      std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {  // the peer finds that this rank has left
  }
}

bool Arena::peer_closed(int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_.at(static_cast<std::size_t>(peer)).channel->closed();
}

pid_t Arena::peer_pid(int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_.at(static_cast<std::size_t>(peer)).channel->peer_pid();
}

void Arena::flush_locked() {
  bool all_sent = true;
  for (const Peer& peer : peers_) {
    all_sent = (!peer.channel || peer.channel->flush()) && all_sent;
  }
  if (all_sent) {
    for (const std::shared_ptr<Segment>& sent : unsent_) {
      sent->unpin_descriptor();
    }
    unsent_.clear();
  }
}

void Arena::drain_locked(Peer& peer) {
  const auto keep = [&peer](std::uint32_t id, int descriptor) {
    note_open_file(descriptor);
    peer.arrived[id] = descriptor;
    if (peer.arrived.size() > kUnmappedDescriptors) {
      map_arrived(peer, peer.arrived.begin());
    }
  };
  const auto release = [&peer](std::uint32_t id) {
    std::weak_ptr<Segment>& used = peer.to_let_go[id];
    if (const auto mapped = peer.mapped.find(id); mapped != peer.mapped.end()) {
      used = mapped->second;
      peer.mapped.erase(mapped);
    }
    if (const auto unused = peer.arrived.find(id); unused != peer.arrived.end()) {
      ::close(unused->second);
      peer.arrived.erase(unused);
    }
  };
  peer.channel->drain(keep, release, [this, &peer](std::uint32_t id) {
    if (const auto released = released_.find(id); released != released_.end()) {
      released->second.users.erase(&peer);
    }
  });
}

}  // namespace accelerate_cpp::comm
