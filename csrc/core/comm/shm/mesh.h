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
// beside the address. Throws Timeout when ranks are missing at `deadline`; `probe` is called while waiting for
// connections; waiting for an address is the store's affair.
std::vector<std::unique_ptr<Channel>> connect_mesh(Store& store, int rank, int size, Deadline deadline,
                                                   const InterruptProbe& probe);

}  // namespace accelerate_cpp::comm
