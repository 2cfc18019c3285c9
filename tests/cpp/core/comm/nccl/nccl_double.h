// A stand-in for NCCL on the devices of gpu_double.h: ranks are threads of one process and find each other by the
// unique id. It moves the data, as late as real NCCL may: an operation gets onto its stream only after the communicator
// was asked for its state a few times, and runs when all ranks' have come to the front of their streams. What hangs
// there hangs here.
//
// Built as a shared library that has NCCL's entry points; tests reach into it through nccl_double().
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/comm/nccl/gpu_double.h"
#include "core/comm/nccl/nccl_api.h"

namespace accelerate_cpp::comm::testing {

class __attribute__((visibility("default"))) NcclDouble {
 public:
  // Guarded by gpu_double().mutex.
  int version = 22703;
  int polls_until_enqueued = 2;  // how often a communicator says "in progress" before a step is done
  std::string last_error;        // what ncclGetLastError says

  // From its next query on, every communicator of `rank` reports `error`.
  void break_rank(int rank, NcclResult error);

  void reset();
  // Communicators that were neither destroyed nor aborted, as text; empty: none.
  std::string leaks();

  // Operands of operations that lay in memory registered for their communicator.
  std::size_t registered_operands = 0;

  std::map<int, NcclResult> broken;
  std::set<NcclHandle> comms;  // all that exist
  int open_groups = 0;
};

__attribute__((visibility("default"))) NcclDouble& nccl_double();

}  // namespace accelerate_cpp::comm::testing
