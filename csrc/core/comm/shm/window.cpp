#include "core/comm/shm/window.h"

#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

class Window final : public Buffer {
 public:
  explicit Window(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}
  void* data() override { return segment_->data(); }

 private:
  const std::shared_ptr<Segment> segment_;
};

// What rank 0, which allocates, tells the others.
struct Offer {
  std::uint64_t segment = 0;
  std::uint64_t error = 0;  // an errno
};

}  // namespace

std::shared_ptr<Buffer> open_window(ShmCommunicator& communicator, std::size_t size_bytes, const Call& call) {
  Group& group = *communicator.group();
  Operation operation{{CallKind::kWindow}};
  operation.signature.count = size_bytes;
  group.run(operation, call, [&] {
    group.announce();
    group.await_announcements(call.deadline);
  });
  Offer offer;
  std::shared_ptr<Segment> segment;
  std::exception_ptr failure;
  if (communicator.rank() == 0) {
    try {
      Arena::Block block = group.arena()->create(size_bytes);
      offer.segment = block.id;
      segment = std::move(block.segment);
    } catch (const SystemFailure& error) {
      offer.error = static_cast<std::uint64_t>(error.error_number());
      failure = std::current_exception();
    } catch (...) {
      offer.error = ENOMEM;
      failure = std::current_exception();
    }
  }
  communicator.broadcast({&offer, sizeof offer, DType::kUInt8}, 0, call.deadline);
  if (failure) {
    std::rethrow_exception(failure);
  }
  if (offer.error != 0) {
    throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of memory for all ranks of the host on " +
                            group.hooks().name_of(0),
                        static_cast<int>(offer.error));
  }
  if (communicator.rank() != 0) {
    segment = group.peer_segment(0, static_cast<std::uint32_t>(offer.segment), call.deadline);
    require_bytes(*segment, 0, size_bytes, group.hooks().number_of(0));
  }
  communicator.barrier(call.deadline);  // a segment must be announced until every peer has mapped it
  if (communicator.rank() == 0) {
    group.arena()->disown(static_cast<std::uint32_t>(offer.segment));
  }
  return std::make_shared<Window>(std::move(segment));
}

}  // namespace accelerate_cpp::comm
