// What strangers may send to the socket on which a rank waits for its peers, and what may stand where a rank looks for
// an address: the rank goes on waiting, or refuses it by an error of this package.
//
// The first byte chooses: even for packets to the socket, each a length and so many bytes of the rest, odd for an
// address in the store.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/memory_store.h"
#include "core/comm/shm/mesh.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kTokenBytes = 16;

class NothingMoreToSend {};

// Connects to the abstract address of rank 0, as any process of this user can.
int stranger(const std::string& name) {
  const int descriptor = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    ::close(descriptor);
    return -1;
  }
  return descriptor;
}

void send_to_rank(const std::uint8_t* data, std::size_t size) {
  MemoryStore store;
  std::vector<int> sockets;
  WaitHooks hooks;
  std::size_t idle = 0;
  hooks.probe = [&] {
    if (size == 0) {
      if (++idle >= 2) {  // the last one has been accepted, and its greeting read
        throw NothingMoreToSend();
      }
      return;
    }
    const std::string published = store.get("shm/address/0", Deadline::after(std::chrono::milliseconds(1)));
    const std::size_t length = std::min<std::size_t>(*data, size - 1);
    const int socket = stranger(published.substr(kTokenBytes));
    if (socket >= 0) {
      ::send(socket, data + 1, length, MSG_NOSIGNAL | MSG_DONTWAIT);
      sockets.push_back(socket);
    }
    data += length + 1;
    size -= length + 1;
  };
  try {
    connect_mesh(store, 0, 3, Deadline::after(std::chrono::seconds(20)), hooks);
    std::abort();  // nobody knew the token
  } catch (const NothingMoreToSend&) {
  }
  for (const int socket : sockets) {
    ::close(socket);
  }
}

void publish(const std::uint8_t* data, std::size_t size) {
  MemoryStore store;
  store.set("shm/address/0", std::string(reinterpret_cast<const char*>(data), size));
  WaitHooks hooks;
  hooks.probe = [] { throw NothingMoreToSend(); };
  try {
    connect_mesh(store, 1, 2, Deadline::after(std::chrono::seconds(20)), hooks);
  } catch (const NothingMoreToSend&) {
  } catch (const Error&) {
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 0 && size < 2048) {
    (data[0] % 2 == 0 ? accelerate_cpp::comm::send_to_rank : accelerate_cpp::comm::publish)(data + 1, size - 1);
  }
  return 0;
}
