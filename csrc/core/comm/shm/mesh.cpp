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
#include "core/base/open_files.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kTokenBytes = 16;
constexpr std::size_t kNameBytes = 16;
constexpr int kPollMilliseconds = 50;
// The most connections without a greeting that are kept: whoever is to come greets as it connects.
constexpr std::size_t kMostSilent = 64;
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

[[noreturn]] void throw_not_opened(const std::string& what, int error) {
  throw SystemFailure(lacks_descriptors(error) ? what + ": " + describe_open_files_limit() : what, error);
}

int make_socket(int flags = 0) {
  const auto open = [flags] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0); };
  const int descriptor = open_within_limit(open);
  if (descriptor < 0) {
    throw_not_opened("creating a unix socket", errno);
  }
  return descriptor;
}

// The abstract address of `name`: a zero byte, then the name, no terminator. Throws InvalidArgument for a name that is
// longer than an address.
socklen_t fill_address(const std::string& name, sockaddr_un* address) {
  *address = {};
  if (name.size() >= sizeof(address->sun_path)) {
    throw InvalidArgument("the store holds a shared memory address of " + std::to_string(name.size()) +
                          " bytes: expected less than " + std::to_string(sizeof(address->sun_path)) +
                          "; something else than the ranks of this run has written to the store");
  }
  address->sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address->sun_path + 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool same_user(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

// Takes the same time wherever the tokens differ.
bool same_token(const Token& one, const Token& other) {
  unsigned char difference = 0;
  for (std::size_t i = 0; i < kTokenBytes; ++i) {
    difference = static_cast<unsigned char>(difference | (one[i] ^ other[i]));
  }
  return difference == 0;
}

std::string address_key(int rank) {
  return "shm/address/" + std::to_string(rank);
}

// One rank's view of a group that is being formed: who is there, and how long this rank may wait for the others.
class Forming {
 public:
  Forming(int rank, int size, const Deadline& deadline, const WaitHooks& hooks)
      : channels(static_cast<std::size_t>(size)), rank_(rank), deadline_(deadline), hooks_(hooks) {}

  // To be called about every kPollMilliseconds while waiting for the ranks that `missing` names.
  void check(const std::string& missing) {
    hooks_.probe();
    for (std::size_t peer = 0; peer < channels.size(); ++peer) {
      // No rank leaves before all have come, so one that does has failed.
      if (channels[peer] && channels[peer]->hung_up()) {
        throw PeerLost(describe(missing) + "; " + hooks_.name_of(static_cast<int>(peer)) +
                       " has ended or given up meanwhile");
      }
    }
    if (deadline_.expired()) {
      throw Timeout(describe(missing) + " in vain; check that all ranks were started on this host");
    }
    if (!warned_ && deadline_.waited() >= hooks_.warn_after) {
      warned_ = true;
      hooks_.warn(describe(missing) + " until now");
    }
  }

  // The time that one wait within the store or the kernel may take.
  Deadline slice() const {
    return Deadline::after(std::min(deadline_.remaining(), std::chrono::milliseconds(kPollMilliseconds)));
  }

  std::string name_of(int peer) const { return hooks_.name_of(peer); }
  int number_of(int peer) const { return hooks_.number_of(peer); }

  std::vector<std::unique_ptr<Channel>> channels;

 private:
  std::string describe(const std::string& missing) const {
    return "forming a group of " + std::to_string(channels.size()) + " ranks: " + hooks_.name_of(rank_) + " waited " +
           std::to_string(deadline_.waited().count()) + " ms for " + missing;
  }

  const int rank_;
  const Deadline& deadline_;
  const WaitHooks& hooks_;
  bool warned_ = false;
};

std::string await_address(Store& store, int peer, Forming& forming) {
  while (true) {
    try {
      return store.get(address_key(peer), forming.slice());
    } catch (const Timeout&) {
      forming.check(forming.name_of(peer));
    }
  }
}

void connect_socket(int socket, const std::string& name, int peer, Forming& forming) {
  // Connecting blocks while the peer's queue is full, which other programs could cause.
  const timeval limit{0, kPollMilliseconds * 1000};
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0) {
    throw SystemFailure("limiting the time to connect", errno);
  }
  sockaddr_un address{};
  const socklen_t length = fill_address(name, &address);
  while (::connect(socket, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED) {
      throw PeerLost("connecting to " + forming.name_of(peer) +
                     " on this host: it has ended, or runs in another network namespace");
    }
    if (errno != EINTR && errno != EAGAIN) {
      throw SystemFailure("connecting to " + forming.name_of(peer) + " on this host", errno);
    }
    forming.check(forming.name_of(peer));
  }
}

std::unique_ptr<Channel> connect_to(Store& store, int rank, int peer, Forming& forming) {
  const std::string published = await_address(store, peer, forming);
  if (published.size() <= kTokenBytes) {
    throw InvalidArgument("the store holds no shared memory address for " + forming.name_of(peer));
  }
  Greeting greeting{};
  std::memcpy(greeting.token.data(), published.data(), kTokenBytes);
  greeting.rank = rank;
  Socket socket(make_socket());
  connect_socket(socket.get(), published.substr(kTokenBytes), peer, forming);
  if (!same_user(socket.get())) {
    throw SystemFailure("connecting to " + forming.name_of(peer) + ", which runs as another user", EPERM);
  }
  if (::send(socket.get(), &greeting, sizeof(greeting), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(greeting))) {
    throw SystemFailure("greeting " + forming.name_of(peer), errno);
  }
  return socket.to_channel();
}

// Accepts the ranks above this one. Connections from other programs, or without a greeting, do not block it.
class Acceptor {
 public:
  Acceptor(int listener, const Token& token, int rank, std::vector<std::unique_ptr<Channel>>& channels)
      : listener_(listener), token_(token), rank_(rank), channels_(channels) {}

  // Waits briefly for an event and handles it.
  void serve() {
    std::vector<pollfd> entries = {{listener_, POLLIN, 0}};
    for (const auto& socket : silent_) {
      entries.push_back({socket->get(), POLLIN, 0});
    }
    if (::poll(entries.data(), entries.size(), kPollMilliseconds) <= 0) {
      return;
    }
    std::vector<std::unique_ptr<Socket>> still_silent;
    for (std::size_t i = 0; i < silent_.size(); ++i) {
      if (entries[i + 1].revents == 0) {
        still_silent.push_back(std::move(silent_[i]));
      } else {
        read_greeting(*silent_[i]);
      }
    }
    silent_ = std::move(still_silent);
    if (entries[0].revents != 0) {
      accept_one();
    }
  }

  // The ranks that have not come yet, for messages: "ranks 1, 3"; empty when all have.
  std::string missing(const Forming& forming) const {
    std::string text;
    int count = 0;
    for (std::size_t peer = static_cast<std::size_t>(rank_) + 1; peer < channels_.size(); ++peer) {
      if (!channels_[peer]) {
        text += (count++ == 0 ? "" : ", ") + std::to_string(forming.number_of(static_cast<int>(peer)));
      }
    }
    return count == 0 ? "" : (count == 1 ? "rank " : "ranks ") + text;
  }

 private:
  void accept_one() {
    const int accepted = open_within_limit([this] { return ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC); });
    if (accepted < 0) {
      if (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN) {
        return;
      }
      throw_not_opened("accepting a connection from a peer", errno);
    }
    auto socket = std::make_unique<Socket>(accepted);
    if (!same_user(accepted)) {
      return;
    }
    if (silent_.size() >= kMostSilent) {  // else whoever connects and stays silent would take all descriptors
      silent_.erase(silent_.begin());
    }
    silent_.push_back(std::move(socket));
  }

  // A socket that sends the greeting of a rank that is still missing becomes that rank's channel.
  void read_greeting(Socket& socket) {
    Greeting greeting{};
    if (::recv(socket.get(), &greeting, sizeof(greeting), MSG_DONTWAIT) != static_cast<ssize_t>(sizeof(greeting))) {
      return;
    }
    const int peer = greeting.rank;
    if (same_token(greeting.token, token_) && peer > rank_ && peer < static_cast<int>(channels_.size()) &&
        !channels_[static_cast<std::size_t>(peer)]) {
      channels_[static_cast<std::size_t>(peer)] = socket.to_channel();
    }
  }

  const int listener_;
  const Token& token_;
  const int rank_;
  std::vector<std::unique_ptr<Channel>>& channels_;
  std::vector<std::unique_ptr<Socket>> silent_;  // connected, not greeted yet
};

}  // namespace

std::vector<std::unique_ptr<Channel>> connect_mesh(Store& store, int rank, int size, Deadline deadline,
                                                   const WaitHooks& hooks) {
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

  Forming forming(rank, size, deadline, hooks);
  for (int peer = 0; peer < rank; ++peer) {
    forming.channels[static_cast<std::size_t>(peer)] = connect_to(store, rank, peer, forming);
  }
  Acceptor acceptor(listener.get(), token, rank, forming.channels);
  while (!acceptor.missing(forming).empty()) {
    acceptor.serve();
    if (const std::string missing = acceptor.missing(forming); !missing.empty()) {
      forming.check(missing);
    }
  }
  // All who read it have come. Torch gives a group that has ended, and a later one of the same ranks, the same part of
  // the store, where peers of the later one would find this address before its own.
  store.remove(address_key(rank));
  return std::move(forming.channels);
}

}  // namespace accelerate_cpp::comm
