// The socket between two ranks of one host: it hands over segments when they are created, and its closing shows that
// the peer has gone.
//
// Messages are packets {kind, segment id}, with a descriptor attached when a segment is announced. Sockets are closed
// in forked children, so that a child that lives on does not make a dead rank look alive.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>

#include "core/base/background.h"

namespace accelerate_cpp::comm {

class Channel {
 public:
  // Takes ownership of a connected SOCK_SEQPACKET socket.
  explicit Channel(int socket);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Tells the peer of a new segment. The descriptor stays the caller's and must stay open until flush() has returned
  // true.
  void announce(std::uint32_t segment, int descriptor);

  // Tells the peer that the segment is no longer used.
  void release(std::uint32_t segment);

  // Tells the peer, which has released this segment of its own, that this process does not use it any more.
  void let_go(std::uint32_t segment);

  // Sends what is queued, without blocking; returns whether all of it has been sent (or the peer is gone).
  bool flush();

  // Receives what has arrived, without blocking. on_announce owns the descriptor it is given.
  void drain(
      const std::function<void(std::uint32_t segment, int descriptor)>& on_announce,
      const std::function<void(std::uint32_t segment)>& on_release,
      const std::function<void(std::uint32_t segment)>& on_let_go = [](std::uint32_t) {});

  // Waits until drain() has something to do (a message or the peer's end), at most `limit`.
  void wait_readable(std::chrono::milliseconds limit) const;

  // Whether the peer's end has been closed, even if there is something left to drain.
  bool hung_up() const;

  // Whether the peer's end has been closed (or this is a forked child); known only after drain() or flush(). What the
  // peer had sent before can still be drained.
  bool closed() const { return closed_; }

  // Process id of the peer when it connected, as seen from here; 0 when it is in another PID namespace.
  pid_t peer_pid() const { return peer_pid_; }

 private:
  struct Message {
    std::uint32_t kind;
    std::uint32_t segment;
    int descriptor;
  };

  // Returns false when the socket would block.
  bool send_one(const Message& message);

  // In a forked child the descriptor is closed and its number may belong to another file.
  void close_if_forked();

  int socket_;
  const OwnerProcess process_;
  pid_t peer_pid_;
  bool closed_ = false;   // nothing can be sent any more
  bool drained_ = false;  // nothing can come any more
  std::deque<Message> queue_;
};

}  // namespace accelerate_cpp::comm
