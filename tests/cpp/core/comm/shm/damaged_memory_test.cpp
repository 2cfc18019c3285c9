// What a rank whose memory is damaged writes about its operands ends in an error of the other, which reads and writes
// nothing outside of segments. Rank 0 is the one with the damage; it takes part with its Group only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/shm/engines.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/shm/window.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::Integers;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr std::size_t kCount = 4096;  // enough to be used where it lies
constexpr std::size_t kBytes = kCount * sizeof(float);

auto damaged(const std::string& what) {
  return ThrowsMessage<SystemFailure>(AllOf(HasSubstr("rank 0 " + what), HasSubstr("its memory is damaged")));
}

// Rank 0 announces `operation`, and to give `given` elements to the ranks; rank 1 calls `call(communicator)`.
template <class Call>
void run_with_damage(const Operation& operation, const std::vector<std::uint64_t>& given, const Call& call) {
  std::atomic<bool> called{false};
  testing::run_threads(2, [&](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    if (rank == 1) {
      call(*communicator);
      called = true;
      return;
    }
    Group& group = *communicator->group();
    const OwnedBlock block(group.arena(), kBytes);
    Operation placed = operation;
    placed.segment = block.id();
    placed.offset_bytes = block.segment()->size_bytes() - operation.offset_bytes;
    group.run(placed, soon(), [&] {
      group.set_counts(given, {given[0], kCount});
      group.announce();
    });
    testing::await(called);
  });
}

// An operation on floats in the arena of rank 0, so many bytes before the end of its segment.
Operation in_arena(CallKind kind, std::size_t bytes_before_end) {
  Operation operation{{kind, DType::kFloat32}};
  operation.signature.count = kCount;
  operation.in_arena = true;
  operation.offset_bytes = bytes_before_end;
  return operation;
}

// Floats in shared memory.
class Shared {
 public:
  explicit Shared(ShmCommunicator& communicator) : buffer_(communicator.allocate(2 * kBytes)) {}
  // The first or the second half of it.
  MemoryView half(std::size_t number = 0) {
    return {static_cast<float*>(buffer_->data()) + number * kCount, kCount, DType::kFloat32};
  }

 private:
  std::shared_ptr<Buffer> buffer_;
};

TEST(DamagedMemory, LeadsAReductionToNoOperandThatEndsOutsideOfItsSegment) {
  for (const std::size_t before_end : {std::size_t{8}, kBytes / 2, kBytes - 4}) {
    run_with_damage(in_arena(CallKind::kAllReduce, before_end), {0, 0}, [](ShmCommunicator& communicator) {
      Shared data(communicator);
      EXPECT_THAT([&] { communicator.all_reduce(data.half(), ReduceOp::kSum, soon()); },
                  damaged("shares " + std::to_string(kBytes) + " bytes of memory, expected " + std::to_string(kBytes)));
    });
  }
}

TEST(DamagedMemory, LeadsAGatheringToNoBlockThatEndsOutsideOfItsSegment) {
  Operation operation = in_arena(CallKind::kAllGather, 8);
  operation.has_counts = true;
  run_with_damage(operation, {kCount, kCount}, [](ShmCommunicator& communicator) {
    Shared input(communicator);
    Shared output(communicator);
    EXPECT_THAT([&] { communicator.all_gather(input.half(), {output.half(0), output.half(1)}, soon()); },
                damaged("shares " + std::to_string(kBytes) + " bytes"));
  });
}

TEST(DamagedMemory, LeadsToNoBlockThatBeginsOutsideOfItsSegment) {
  const auto call = [](const std::string& what) {
    return [what](ShmCommunicator& communicator) {
      Shared input(communicator);
      Shared output(communicator);
      const std::vector<MemoryView> outputs = {output.half(0), output.half(1)};
      EXPECT_THAT([&] { communicator.all_to_all({input.half(0), input.half(1)}, outputs, soon()); }, damaged(what));
    };
  };
  Operation operation = in_arena(CallKind::kAllToAll, kBytes);
  operation.has_counts = true;
  operation.signature.count = 2 * kCount;
  // What it gives to itself comes before what it gives to rank 1. In all, that seems to be nothing.
  constexpr std::uint64_t kWrapped = std::numeric_limits<std::uint64_t>::max() / sizeof(float) + 1 - kCount;
  run_with_damage(operation, {kWrapped, kCount}, call("gives " + std::to_string(kWrapped) + " elements to rank 0"));
  run_with_damage(operation, {kCount, kCount}, call("shares " + std::to_string(kBytes) + " bytes"));
}

TEST(DamagedMemory, LeadsToNoMoreElementsThanTheOthersHaveRoomFor) {
  Operation operation{{CallKind::kBroadcast, DType::kFloat32}};
  operation.signature.root = 0;
  operation.signature.count = 4;
  for (const std::uint64_t given : {kCount, std::size_t{3}}) {
    run_with_damage(operation, {0, given}, [given](ShmCommunicator& communicator) {
      std::vector<float> data(kCount, 1);
      EXPECT_THAT([&] { communicator.broadcast({data.data(), 4, DType::kFloat32}, 0, soon()); },
                  damaged("gives " + std::to_string(given) + " elements to rank 1, expected 4"));
      EXPECT_THAT(data, Each(1.0f));
    });
  }
}

TEST(DamagedMemory, LeadsToNoEndlessRowOfPages) {
  testing::run_engines(2, [](testing::Engine& engine) {
    if (engine.rank() == 0) {
      testing::send(engine, 1, 0, Integers(1));
    }
    testing::meet(*engine.group);
    if (engine.rank() == 1) {
      const std::uint32_t outbox = engine.group->control(0).outbox;
      std::byte* const memory = engine.group->arena()->of_peer(0, outbox - 1)->data();
      for (int destination = 0; destination < 2; ++destination) {
        mailbox(memory, destination).next = outbox;
      }
      Integers data(1);
      EXPECT_THAT([&] { engine.messages->receive(data.view(), 0, 0, soon()); },
                  damaged("names segment 1 twice as a page of its messages"));
    }
    testing::meet(*engine.group);
  });
}

TEST(DamagedMemory, LeadsToNoWindowThatIsTooSmall) {
  testing::run_threads(2, [](Store& store, int rank) {
    const auto communicator = ShmCommunicator::connect(store, rank, 2, soon(), {});
    Group& group = *communicator->group();
    const OwnedBlock block(group.arena(), kBytes);
    if (rank == 1) {
      EXPECT_THAT(
          [&] { communicator->window(2 * kBytes, soon()); },
          damaged("shares " + std::to_string(kBytes) + " bytes of memory, expected " + std::to_string(2 * kBytes)));
    } else {
      Operation operation{{CallKind::kWindow}};
      operation.signature.count = 2 * kBytes;
      testing::compare(group, operation);
      std::uint64_t offer[] = {block.id(), 0};
      communicator->broadcast({offer, sizeof offer, DType::kUInt8}, 0, soon());
    }
    communicator->barrier(soon());  // rank 0 keeps its segment as long
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
