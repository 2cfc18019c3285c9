#include "core/comm/all_reduce_together.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/base/view_parts.h"

namespace accelerate_cpp::comm {
namespace {

// In place of one operand's shape: their number, and a digest of their counts and shapes in order, so that ranks whose
// operands differ notice it even where all of them together are of the same size.
Shape shape_of(const std::vector<Reduced>& pack) {
  std::uint64_t digest = 0xcbf29ce484222325;  // FNV-1a, by words
  const auto mix = [&digest](std::uint64_t word) { digest = (digest ^ word) * 0x100000001b3; };
  for (const Reduced& operand : pack) {
    mix(operand.output.count);
    mix(static_cast<std::uint64_t>(operand.shape.dimensions));
    for (int dimension = 0; dimension < operand.shape.dimensions; ++dimension) {
      mix(static_cast<std::uint64_t>(operand.shape.sizes[dimension]));
    }
  }
  return {static_cast<std::int64_t>(pack.size()), static_cast<std::int64_t>(digest)};
}

}  // namespace

void AllReduceTogether::run(const std::vector<Reduced>& operands, Reduction reduction, const Deadline& deadline,
                            std::string_view location) {
  struct Pack {
    std::vector<Reduced> operands;
    std::size_t size_bytes = 0;
  };
  std::array<Pack, kNumDTypes> packs;
  const auto reduce_pack = [&](Pack& pack) {
    if (!pack.operands.empty()) {
      reduce_packed(pack.operands, reduction, Call(deadline, shape_of(pack.operands), location));
      pack = Pack();
    }
  };
  for (const Reduced& operand : operands) {
    const std::size_t size_bytes = operand.output.size_bytes();
    if (size_bytes > kSmallOperandBytes || operands.size() == 1) {
      copy_to(operand.input.data, operand.output);
      communicator_->all_reduce(operand.output, reduction, Call(deadline, operand.shape, location));
      continue;
    }
    Pack& pack = packs[static_cast<std::size_t>(operand.output.dtype)];
    if (pack.size_bytes + size_bytes > kRoomBytes) {
      reduce_pack(pack);
    }
    pack.operands.push_back(operand);
    pack.size_bytes += size_bytes;
  }
  for (Pack& pack : packs) {
    reduce_pack(pack);
  }
}

void AllReduceTogether::reduce_packed(const std::vector<Reduced>& pack, Reduction reduction, const Call& call) {
  if (room_ == nullptr) {
    room_ = communicator_->allocate(kRoomBytes);
  }
  MemoryView whole{room_->data(), 0, pack.front().output.dtype};
  for (const Reduced& operand : pack) {
    const MemoryView place{whole.bytes() + whole.size_bytes(), operand.input.count, whole.dtype};
    copy_to(operand.input.data, place);
    whole.count += place.count;
  }
  communicator_->all_reduce(whole, reduction, call);
  std::size_t begin = 0;
  for (const Reduced& operand : pack) {
    copy_to(within(whole, begin, operand.output.count).data, operand.output);
    begin += operand.output.count;
  }
}

}  // namespace accelerate_cpp::comm
