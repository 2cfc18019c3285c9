// What a rank has asked a group for: how many operations of each kind, and the bytes of their operands.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "core/comm/call_signature.h"

namespace accelerate_cpp::comm {

// Counts from any thread. Bytes are those of what this rank puts in: the tensor of an all_reduce, reduce or broadcast,
// its own part of an all_gather or gather, all parts of a reduce_scatter, scatter (on the root) or all_to_all, also the
// one that it keeps; of a receive those that arrive. What travels depends on the algorithm.
class Traffic {
 public:
  struct Total {
    std::uint64_t operations = 0;
    std::uint64_t size_bytes = 0;
    bool operator==(const Total& other) const = default;
  };

  void add(CallKind kind, std::size_t size_bytes) noexcept;

  // By the name of the kind, of kinds that there were.
  std::map<std::string, Total> totals() const;

 private:
  static constexpr std::size_t kKinds = static_cast<std::size_t>(CallKind::kReceive) + 1;
  struct Counted {
    std::atomic<std::uint64_t> operations{0};
    std::atomic<std::uint64_t> size_bytes{0};
  };
  std::array<Counted, kKinds> counted_{};
};

}  // namespace accelerate_cpp::comm
