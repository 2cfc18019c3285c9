// What may stand in the shared memory of a peer whose memory is damaged: its control block (the first 8 KB of the
// input, but for the first byte) and its outbox (the rest). Operations end, or are refused by an error of this package;
// none reads outside of the segments.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
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

template <class Operation>
void attempt(const Operation& operation) {
  try {
    operation();
  } catch (const Error&) {
  } catch (const InternalError&) {
  }
}

void run(const std::uint8_t* data, std::size_t size) {
  const std::uint8_t choice = size > 0 ? data[0] : 0;
  const std::uint8_t* const begin = size > 0 ? data + 1 : data;
  const std::size_t rest = size > 0 ? size - 1 : 0;
  const std::size_t in_control = std::min(rest, kControlBytes);
  const int control = file_with(begin, in_control, choice % 8 == 7 ? 4096 : kSegmentBytes);
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
    std::vector<float> values(4096);
    const MemoryView view{values.data(), values.size(), DType::kFloat32};
    const auto received = [&](std::size_t count, std::uint64_t tag) {
      attempt([&] {
        rank->receive(MemoryView{values.data(), count, DType::kFloat32}, 1, tag, {at_once()})->wait(at_once());
      });
    };
    switch (choice % 8 % 6) {  // one each, as an operation that fails is the last one
      case 0:
        attempt([&] { rank->all_reduce(view, ReduceOp::kSum, {at_once()}); });
        break;
      case 1:
        attempt([&] { rank->broadcast(view, 1, {at_once()}); });
        break;
      case 2:
        attempt([&] { rank->barrier({at_once()}); });
        break;
      default:
        received(4, 0);
        received(values.size(), 1);
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
