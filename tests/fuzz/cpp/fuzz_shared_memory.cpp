// What may stand in the shared memory of a peer whose memory is damaged: its control block (the first 8 KB of the
// input, but for the first byte) and its outbox (the rest). Operations end, or are refused by an error of this package;
// none reads or writes outside of the segments.
//
// The first byte chooses the operation. With kIsDamage, the control block is that of a rank which takes part in it as
// it should, and the input says which bits of it are damaged; with kIsInArena, operands lie in shared memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/check.h"
#include "core/base/error.h"
#include "core/comm/memory_store.h"
#include "core/comm/shm/channel.h"
#include "core/comm/shm/mesh.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kControlBytes = 8192;
constexpr std::uint8_t kIsDamage = 8;
constexpr std::uint8_t kIsInArena = 16;
constexpr std::size_t kCount = 4096;              // elements that a rank gives; enough to be used where they lie
constexpr off_t kSegmentBytes = off_t{16} << 20;  // enough for what follows the control block; nothing of it is used

Deadline soon() {
  return Deadline::after(std::chrono::seconds(20));
}

Deadline at_once() {
  return Deadline::after(std::chrono::milliseconds(0));
}

int file_with(const std::uint8_t* data, std::size_t size, off_t size_bytes) {
  const int file = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (::ftruncate(file, size_bytes) != 0 || (size > 0 && ::pwrite(file, data, size, 0) < 0)) {
    std::abort();
  }
  return file;
}

enum class Choice : std::uint8_t { kAllReduce, kBroadcast, kBarrier, kAllToAll, kMessages };

Choice operation_of(std::uint8_t choice) {
  return static_cast<Choice>(std::min(choice % 8 % 6, 4));
}

// The control block of a peer that has announced `choice` and done its part of it.
std::vector<std::uint8_t> sound_control(std::uint8_t choice) {
  std::vector<std::uint8_t> bytes(kControlBytes);
  auto& control = *reinterpret_cast<RankControl*>(bytes.data());
  control.announced = 1;
  control.staged = control.consumed = 1000;
  control.outbox = 2;
  Operation operation{{CallKind::kBarrier}};
  const auto set = [&](CallKind kind, std::uint64_t count, bool has_counts) {
    operation = {{kind, DType::kFloat32}};
    operation.signature.count = count;
    operation.has_counts = has_counts;
    operation.in_arena = (choice & kIsInArena) != 0;
    operation.segment = 1;
  };
  std::array<std::uint64_t, 4> counts{};  // given to rank 0 and 1, expected of rank 0 and 1
  switch (operation_of(choice)) {
    case Choice::kAllReduce:
      set(CallKind::kAllReduce, kCount, false);
      break;
    case Choice::kBroadcast:
      set(CallKind::kBroadcast, kCount, false);
      operation.signature.root = 1;
      counts = {kCount, 0, 0, 0};
      break;
    case Choice::kAllToAll:
      set(CallKind::kAllToAll, 2 * kCount, true);
      counts = {kCount, kCount, kCount, kCount};
      break;
    default:
      break;
  }
  control.operations[1] = operation;  // the first one is number 1
  std::memcpy(bytes.data() + 4096 + sizeof counts, counts.data(), sizeof counts);
  return bytes;
}

template <class Action>
void attempt(const Action& action) {
  try {
    action();
  } catch (const Error&) {
  } catch (const InternalError&) {
  }
}

void run(const std::uint8_t* data, std::size_t size) {
  const std::uint8_t choice = size > 0 ? data[0] : 0;
  const std::uint8_t* const begin = size > 0 ? data + 1 : data;
  const std::size_t rest = size > 0 ? size - 1 : 0;
  const std::size_t in_control = std::min(rest, kControlBytes);
  std::vector<std::uint8_t> block = (choice & kIsDamage) != 0 ? sound_control(choice) : std::vector<std::uint8_t>();
  block.resize(std::max(block.size(), in_control));
  for (std::size_t i = 0; i < in_control; ++i) {
    block[i] ^= begin[i];
  }
  const int control = file_with(block.data(), block.size(), choice % 8 == 7 ? 4096 : kSegmentBytes);
  const int outbox = file_with(begin + in_control, rest - in_control, choice % 8 == 6 ? 4096 : kSegmentBytes);

  MemoryStore store;
  std::vector<std::unique_ptr<Channel>> channels;
  std::thread peer([&] {
    channels = connect_mesh(store, 1, 2, soon(), {});
    channels[0]->announce(0, control);
    channels[0]->announce(1, outbox);
    channels[0]->flush();
  });
  std::shared_ptr<ShmCommunicator> rank;
  attempt([&] { rank = ShmCommunicator::connect(store, 0, 2, soon(), {}); });
  peer.join();
  if (rank != nullptr) {
    std::vector<float> values(4 * kCount);
    std::shared_ptr<Buffer> shared;
    attempt([&] { shared = (choice & kIsInArena) != 0 ? rank->allocate(values.size() * sizeof(float)) : nullptr; });
    auto* const first = shared ? static_cast<float*>(shared->data()) : values.data();
    const auto part = [&](std::size_t number) { return MemoryView{first + number * kCount, kCount, DType::kFloat32}; };
    const auto received = [&](std::size_t count, std::uint64_t tag) {
      attempt([&] {
        rank->receive(MemoryView{values.data(), count, DType::kFloat32}, 1, tag, {at_once()})->wait(at_once());
      });
    };
    switch (operation_of(choice)) {  // one each, as an operation that fails is the last one
      case Choice::kAllReduce:
        attempt([&] { rank->all_reduce(part(0), ReduceOp::kSum, {at_once()}); });
        break;
      case Choice::kBroadcast:
        attempt([&] { rank->broadcast(part(0), 1, {at_once()}); });
        break;
      case Choice::kBarrier:
        attempt([&] { rank->barrier({at_once()}); });
        break;
      case Choice::kAllToAll:
        attempt([&] { rank->all_to_all({part(0), part(1)}, {part(2), part(3)}, {at_once()}); });
        break;
      case Choice::kMessages:
        received(4, 0);
        received(kCount, 1);
        attempt([&] { rank->someone_has_left(); });
    }
  }
  rank.reset();
  channels.clear();
  ::close(control);
  ::close(outbox);
}

}  // namespace
}  // namespace accelerate_cpp::comm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  accelerate_cpp::comm::run(data, size);
  return 0;
}
