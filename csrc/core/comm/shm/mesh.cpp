#include "core/comm/shm/mesh.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kTokenBytes = 16;
constexpr std::size_t kNameBytes = 16;
constexpr int kPollMilliseconds = 50;
constexpr const char* kNamePrefix = "accelerate_cpp-";

using Token = std::array<unsigned char, kTokenBytes>;

struct Greeting {
  Token token;
  std::int32_t rank;
};

class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return descriptor_; }
  std::unique_ptr<Channel> to_channel() {
    auto channel = std::make_unique<Channel>(descriptor_);
    descriptor_ = -1;
    return channel;
  }

 private:
  int descriptor_;
};

void fill_random(void* bytes, std::size_t size) {
  if (::getrandom(bytes, size, 0) != static_cast<ssize_t>(size)) {
    throw SystemFailure("getrandom", errno);
  }
}

std::string hex(const unsigned char* bytes, std::size_t size) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < size; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

int make_socket(int flags = 0) {
  const int descriptor = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0);
  if (descriptor < 0) {
    throw SystemFailure("creating a unix socket", errno);
  }
  return descriptor;
}

// The abstract address of `name`: a zero byte, then the name, no terminator.
socklen_t fill_address(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address->sun_path + 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool same_user(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

std::string address_key(int rank) {
  return "shm/address/" + std::to_string(rank);
}

std::unique_ptr<Channel> connect_to(Store& store, int rank, int peer, Deadline deadline) {
  const std::string published = store.get(address_key(peer), deadline);
  if (published.size() <= kTokenBytes) {
    throw InvalidArgument("the store holds no shared memory address for rank " + std::to_string(peer));
  }
  Greeting greeting{};
  std::memcpy(greeting.token.data(), published.data(), kTokenBytes);
  greeting.rank = rank;
  Socket socket(make_socket());
  sockaddr_un address{};
  const socklen_t length = fill_address(published.substr(kTokenBytes), &address);
  int result = 0;
  do {
    result = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
  } while (result != 0 && errno == EINTR);
  if (result != 0 || !same_user(socket.get())) {
    throw SystemFailure("connecting to rank " + std::to_string(peer) +
                            " on this host (it may have ended, or run as another user or in another network namespace)",
                        result != 0 ? errno : EPERM);
  }
  if (::send(socket.get(), &greeting, sizeof(greeting), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(greeting))) {
    throw SystemFailure("greeting rank " + std::to_string(peer), errno);
  }
  return socket.to_channel();
}

// Accepts the ranks above this one. Connections of others, or that never greet, hold nobody up.
class Acceptor {
 public:
  Acceptor(int listener, const Token& token, int rank, std::vector<std::unique_ptr<Channel>>& channels)
      : listener_(listener), token_(token), rank_(rank), channels_(channels) {}

  // Waits a little for something to happen and deals with it; returns how many ranks have been connected thereby.
  int serve() {
    std::vector<pollfd> entries = {{listener_, POLLIN, 0}};
    for (const auto& socket : silent_) {
      entries.push_back({socket->get(), POLLIN, 0});
    }
    if (::poll(entries.data(), entries.size(), kPollMilliseconds) <= 0) {
      return 0;
    }
    int connected = 0;
    std::vector<std::unique_ptr<Socket>> still_silent;
    for (std::size_t i = 0; i < silent_.size(); ++i) {
      if (entries[i + 1].revents == 0) {
        still_silent.push_back(std::move(silent_[i]));
      } else if (greeted(*silent_[i])) {
        ++connected;
      }
    }
    silent_ = std::move(still_silent);
    if (entries[0].revents != 0) {
      accept_one();
    }
    return connected;
  }

 private:
  void accept_one() {
    const int accepted = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted < 0) {
      if (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN) {
        return;
      }
      throw SystemFailure("accepting a connection from a peer", errno);
    }
    auto socket = std::make_unique<Socket>(accepted);
    if (same_user(accepted)) {
      silent_.push_back(std::move(socket));
    }
  }

  // Whether the socket has sent the greeting of a rank that is still missing; then it has become that rank's channel.
  bool greeted(Socket& socket) {
    Greeting greeting{};
    if (::recv(socket.get(), &greeting, sizeof(greeting), MSG_DONTWAIT) != static_cast<ssize_t>(sizeof(greeting))) {
      return false;
    }
    const int peer = greeting.rank;
    if (greeting.token != token_ || peer <= rank_ || peer >= static_cast<int>(channels_.size()) ||
        channels_[static_cast<std::size_t>(peer)]) {
      return false;
    }
    channels_[static_cast<std::size_t>(peer)] = socket.to_channel();
    return true;
  }

  const int listener_;
  const Token& token_;
  const int rank_;
  std::vector<std::unique_ptr<Channel>>& channels_;
  std::vector<std::unique_ptr<Socket>> silent_;  // connected, not greeted yet
};

}  // namespace

std::vector<std::unique_ptr<Channel>> connect_mesh(Store& store, int rank, int size, Deadline deadline,
                                                   const InterruptProbe& probe) {
  Token token{};
  unsigned char random_name[kNameBytes];
  fill_random(token.data(), token.size());
  fill_random(random_name, sizeof(random_name));
  const std::string socket_name = kNamePrefix + hex(random_name, sizeof(random_name));

  const Socket listener(make_socket(SOCK_NONBLOCK));
  sockaddr_un address{};
  const socklen_t length = fill_address(socket_name, &address);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), size) != 0) {
    throw SystemFailure("listening on an abstract unix socket", errno);
  }
  store.set(address_key(rank), std::string(token.begin(), token.end()) + socket_name);

  std::vector<std::unique_ptr<Channel>> channels(static_cast<std::size_t>(size));
  for (int peer = 0; peer < rank; ++peer) {
    channels[peer] = connect_to(store, rank, peer, deadline);
  }
  Acceptor acceptor(listener.get(), token, rank, channels);
  for (int missing = size - 1 - rank; missing > 0; missing -= acceptor.serve()) {
    probe();
    if (deadline.expired()) {
      throw Timeout("rank " + std::to_string(rank) + " waited " + std::to_string(deadline.waited().count()) +
                    " ms for " + std::to_string(missing) + " more of " + std::to_string(size) +
                    " ranks to connect; check that all of them were started on this host");
    }
  }
  return channels;
}

}  // namespace accelerate_cpp::comm
