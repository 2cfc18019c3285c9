// One segment of shared memory per rank, all of one layout, which every rank maps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/deadline.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::grad {

class SegmentsOfRanks {
 public:
  // Collective: `size_bytes` of zeros for each rank. `layout` is a fingerprint of what lies in them; throws
  // MismatchedCollective on all ranks if that differs, which models with different parameters are the reason for.
  SegmentsOfRanks(comm::ShmCommunicator& communicator, std::size_t size_bytes, std::uint64_t layout, Deadline deadline);

  std::byte* base(int rank) const { return segments_[static_cast<std::size_t>(rank)]->data(); }
  // Equal on all ranks, and another one than that of all others of the group; its lower half is 0.
  std::uint64_t identity() const { return identity_; }

 private:
  std::unique_ptr<comm::OwnedBlock> own_;
  std::vector<std::shared_ptr<comm::Segment>> segments_;
  std::uint64_t identity_;
};

}  // namespace accelerate_cpp::grad
