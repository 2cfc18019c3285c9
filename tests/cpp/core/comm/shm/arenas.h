// Arenas that are connected with each other within a process.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/shm/arena.h"

namespace accelerate_cpp::comm::testing {

// Two connected arenas: `first` is rank 0 and `second` rank 1 of a group of two.
struct Pair {
  Pair() {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
      throw SystemFailure("socketpair", errno);
    }
    std::vector<std::unique_ptr<Channel>> of_first(2);
    of_first[1] = std::make_unique<Channel>(sockets[0]);
    first = std::make_shared<Arena>(std::move(of_first));
    std::vector<std::unique_ptr<Channel>> of_second(2);
    of_second[0] = std::make_unique<Channel>(sockets[1]);
    second = std::make_shared<Arena>(std::move(of_second));
  }

  std::shared_ptr<Arena> first;
  std::shared_ptr<Arena> second;
};

}  // namespace accelerate_cpp::comm::testing
