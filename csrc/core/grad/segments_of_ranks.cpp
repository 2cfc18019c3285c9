#include "core/grad/segments_of_ranks.h"

#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::grad {

SegmentsOfRanks::SegmentsOfRanks(comm::ShmCommunicator& communicator, std::size_t size_bytes, std::uint64_t layout,
                                 Deadline deadline)
    : own_(std::make_unique<comm::OwnedBlock>(communicator.group()->arena(), size_bytes)),
      segments_(static_cast<std::size_t>(communicator.size())) {
  struct Home {
    std::uint64_t layout;
    std::uint64_t segment;
  };
  const Home own{layout, own_->id()};
  std::vector<Home> homes(segments_.size());
  std::vector<MemoryView> outputs;
  for (Home& home : homes) {
    outputs.push_back({&home, 2, DType::kInt64});
  }
  communicator.all_gather({&own, 2, DType::kInt64}, outputs, deadline);
  for (std::size_t peer = 1; peer < homes.size(); ++peer) {
    if (homes[peer].layout != homes[0].layout) {
      throw MismatchedCollective(communicator.name_of(0) + " and " + communicator.name_of(static_cast<int>(peer)) +
                                 " prepared models with different parameters; every rank must build the same model");
    }
  }
  for (int peer = 0; peer < communicator.size(); ++peer) {
    const auto id = static_cast<std::uint32_t>(homes[static_cast<std::size_t>(peer)].segment);
    segments_[static_cast<std::size_t>(peer)] =
        peer == communicator.rank() ? own_->segment() : communicator.group()->peer_segment(peer, id, deadline);
  }
  identity_ = homes[0].segment << 32;
  communicator.barrier(deadline);  // a segment must exist until every peer has mapped it
}

}  // namespace accelerate_cpp::grad
