// What a peer may send over the channel between two ranks: each message is a length, a number of descriptors and the
// bytes. It is taken, or refused by an error of this package, and no descriptor is left open.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/shm/arena.h"
#include "core/comm/shm/channel.h"

namespace accelerate_cpp::comm {
namespace {

constexpr int kMostDescriptors = 4;

void send_message(int socket, const std::uint8_t* bytes, std::size_t size, int descriptors, int file) {
  iovec part{const_cast<std::uint8_t*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptors > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(static_cast<std::size_t>(descriptors) * sizeof(int));
    cmsghdr* const attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(static_cast<std::size_t>(descriptors) * sizeof(int));
    for (int i = 0; i < descriptors; ++i) {
      std::memcpy(CMSG_DATA(attached) + static_cast<std::size_t>(i) * sizeof(int), &file, sizeof(int));
    }
  }
  ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The lowest number that the next descriptor of this process gets.
int next_descriptor() {
  const int descriptor = ::fcntl(0, F_DUPFD_CLOEXEC, 0);
  ::close(descriptor);
  return descriptor;
}

void run(const std::uint8_t* data, std::size_t size) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    std::abort();
  }
  const int file = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (size > 0 && data[0] % 4 != 0 && ::ftruncate(file, 4096 * (data[0] % 4)) != 0) {
    std::abort();
  }
  std::vector<std::unique_ptr<Channel>> channels;
  channels.push_back(nullptr);
  channels.push_back(std::make_unique<Channel>(sockets[0]));
  {
    Arena arena(std::move(channels));
    while (size > 2) {
      const std::size_t length = std::min<std::size_t>(data[0] % 16, size - 2);
      send_message(sockets[1], data + 2, length, data[1] % (kMostDescriptors + 1), file);
      data += length + 2;
      size -= length + 2;
      try {
        arena.poll();
        for (std::uint32_t id = 0; id < 4; ++id) {
          if (const std::shared_ptr<Segment> segment = arena.of_peer(1, id)) {
            require_bytes(*segment, 0, 1, 1);
          }
        }
      } catch (const Error&) {
      }
    }
  }
  ::close(sockets[1]);
  ::close(file);
}

}  // namespace
}  // namespace accelerate_cpp::comm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int before = accelerate_cpp::comm::next_descriptor();
  accelerate_cpp::comm::run(data, size);
  if (accelerate_cpp::comm::next_descriptor() != before) {
    std::abort();  // a descriptor is left
  }
  return 0;
}
