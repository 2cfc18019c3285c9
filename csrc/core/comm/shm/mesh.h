// Connects the ranks of one host: one socket between every two of them.
#pragma once

#include <memory>
#include <vector>

#include "core/base/deadline.h"
#include "core/comm/options.h"
#include "core/comm/shm/channel.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

// Returns one channel per rank; the entry of `rank` itself is empty. Addresses are abstract sockets (no file),
// published in `store`; a connection is accepted only from a process of the same user that knows the token published
// beside the address. A rank must keep its channels until all ranks have returned. Throws Timeout when ranks are
// missing at `deadline`, PeerLost when one that has come ends before all have. Of `hooks`, the probe is called about
// every 50 ms while waiting, and warn once.
std::vector<std::unique_ptr<Channel>> connect_mesh(Store& store, int rank, int size, Deadline deadline,
                                                   const WaitHooks& hooks);

}  // namespace accelerate_cpp::comm
