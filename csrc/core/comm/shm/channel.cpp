#include "core/comm/shm/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/open_files.h"
#include "core/comm/shm/fork_guard.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::uint32_t kAnnounce = 1;
constexpr std::uint32_t kRelease = 2;
constexpr std::uint32_t kLetGo = 3;

struct Packet {
  std::uint32_t kind;
  std::uint32_t segment;
};

// The descriptors that came with a message, which this process owns now; those that are not released are closed.
class Attached {
 public:
  explicit Attached(msghdr& header) {
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
      if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
        descriptors_.resize((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        std::memcpy(descriptors_.data(), CMSG_DATA(part), descriptors_.size() * sizeof(int));
      }
    }
  }
  ~Attached() {
    for (const int descriptor : descriptors_) {
      ::close(descriptor);
    }
  }
  Attached(const Attached&) = delete;
  Attached& operator=(const Attached&) = delete;
  bool is_one() const { return descriptors_.size() == 1; }
  bool empty() const { return descriptors_.empty(); }
  int release() {
    const int descriptor = descriptors_.front();
    descriptors_.clear();
    return descriptor;
  }

 private:
  std::vector<int> descriptors_;
};

bool is_disconnect(int error) {
  return error == EPIPE || error == ECONNRESET || error == ENOTCONN;
}

}  // namespace

Channel::Channel(int socket) : socket_(socket), peer_pid_(0) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0) {
    peer_pid_ = credentials.pid;
  }
  close_after_fork(socket);
}

Channel::~Channel() {
  if (!process_.forked()) {
    close_now(socket_);
  }
}

void Channel::announce(std::uint32_t segment, int descriptor) {
  queue_.push_back({kAnnounce, segment, descriptor});
}

void Channel::release(std::uint32_t segment) {
  queue_.push_back({kRelease, segment, -1});
}

void Channel::let_go(std::uint32_t segment) {
  queue_.push_back({kLetGo, segment, -1});
}

void Channel::wait_readable(std::chrono::milliseconds limit) const {
  pollfd entry{socket_, POLLIN, 0};
  ::poll(&entry, 1, static_cast<int>(limit.count()));
}

bool Channel::hung_up() const {
  pollfd entry{socket_, POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0;
}

void Channel::close_if_forked() {
  if (process_.forked()) {
    closed_ = drained_ = true;
  }
}

bool Channel::flush() {
  close_if_forked();
  while (!queue_.empty() && !closed_) {
    if (!send_one(queue_.front())) {
      return false;
    }
    queue_.pop_front();
  }
  if (closed_) {
    queue_.clear();
  }
  return true;
}

bool Channel::send_one(const Message& message) {
  Packet packet{message.kind, message.segment};
  iovec part{&packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (message.descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* const attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(attached), &message.descriptor, sizeof(int));
  }
  while (::sendmsg(socket_, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS) {
      return false;
    }
    if (is_disconnect(errno)) {
      closed_ = true;
      return true;
    }
    if (errno != EINTR) {
      throw SystemFailure("sending a shared memory segment to a peer", errno);
    }
  }
  return true;
}

void Channel::drain(const std::function<void(std::uint32_t, int)>& on_announce,
                    const std::function<void(std::uint32_t)>& on_release,
                    const std::function<void(std::uint32_t)>& on_let_go) {
  close_if_forked();
  while (!drained_) {
    Packet packet{};
    iovec part{&packet, sizeof(packet)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t received = ::recvmsg(socket_, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received == 0) {
      closed_ = drained_ = true;
      return;
    }
    if (received < 0) {
      // If a peer ended without reading everything, one read fails with a reset; its own messages can be read after
      // that.
      if (errno == EINTR || errno == ECONNRESET) {
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      }
      throw SystemFailure("receiving from a peer", errno);
    }
    Attached attached(header);
    const bool is_whole = received == static_cast<ssize_t>(sizeof(packet)) && (header.msg_flags & MSG_TRUNC) == 0;
    if (is_whole && packet.kind == kRelease && attached.empty()) {
      on_release(packet.segment);
    } else if (is_whole && packet.kind == kLetGo && attached.empty()) {
      on_let_go(packet.segment);
    } else if (is_whole && packet.kind == kAnnounce && attached.is_one()) {
      on_announce(packet.segment, attached.release());
    } else if (is_whole && packet.kind == kAnnounce && attached.empty()) {
      throw SystemFailure("receiving a shared memory segment from a peer: " + describe_open_files_limit(), EMFILE);
    } else {
      throw SystemFailure("a peer has sent a message of " + std::to_string(received) + " bytes and kind " +
                              std::to_string(packet.kind) +
                              " that no rank of this version sends; see that all ranks run the same installation",
                          EPROTO);
    }
  }
}

}  // namespace accelerate_cpp::comm
