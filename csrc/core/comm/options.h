// What collectives can be asked for beyond their operands.
#pragma once

#include <cstdint>
#include <functional>

namespace accelerate_cpp::comm {

enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct };

// Called from inside long waits; throws when the caller wants to stop waiting (Ctrl-C).
using InterruptProbe = std::function<void()>;

}  // namespace accelerate_cpp::comm
