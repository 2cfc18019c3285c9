// Collectives that all ranks know alike beforehand, and what they must do to every byte, in plain loops.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/ranks.h"
#include "core/comm/reduction_reference.h"
#include "core/comm/shm/control_block.h"

namespace accelerate_cpp::comm::testing {

// Where the operands of a rank lie: in ordinary memory, in shared memory of their own, or in shared memory that is used
// again and again.
enum class Placement { kHeap, kShared, kKept };

// One collective.
struct Step {
  CallKind kind;
  DType dtype = DType::kInt32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  // Elements: of every rank's block; for all_to_all, of the block from rank r to rank s at [r * size + s].
  std::vector<std::size_t> counts;
  std::vector<Placement> placements;  // of every rank
  bool in_place = false;              // where the operation has such a form
  bool apart = false;                 // the blocks of a rank are separate tensors
  std::size_t shift = 0;              // elements between a multiple of 64 bytes and an operand
  unsigned seed = 0;                  // of the values
  bool exact = true;                  // reductions have the bits of sums in the order of ranks
};

inline std::string to_string(const Step& step) {
  std::string text = std::string(name(step.kind)) + "(" + name(step.op) + ") of " + accelerate_cpp::name(step.dtype) +
                     ", root " + std::to_string(step.root) + ", counts";
  for (const std::size_t count : step.counts) {
    text += " " + std::to_string(count);
  }
  text += ", placements";
  for (const Placement placement : step.placements) {
    text += " " + std::to_string(static_cast<int>(placement));
  }
  return text + (step.in_place ? ", in place" : "") + (step.apart ? ", apart" : "") + ", shift " +
         std::to_string(step.shift);
}

// Every rank's factor in a pre-multiplied sum.
inline double step_factor(int rank) {
  return 0.7 - 0.3 * rank;
}

// The memory of one rank's operands, with a margin on either side of each that nobody may write to.
class Memory {
 public:
  explicit Memory(Communicator& communicator) : communicator_(communicator) {}

  std::byte* take(Placement placement, std::size_t size_bytes, std::size_t shift_bytes) {
    const std::size_t whole_bytes = (size_bytes + shift_bytes + 2 * kMargin + 63) / 64 * 64;
    std::byte* const whole = whole_of(placement, whole_bytes);
    std::fill(whole, whole + whole_bytes, kUntouched);
    std::byte* const data = whole + kMargin + shift_bytes;
    taken_.push_back({whole, data, size_bytes, whole_bytes});
    return data;
  }

  // Frees everything; returns how many bytes were written to beside what was taken.
  std::size_t release() {
    std::size_t written = 0;
    for (const Taken& taken : taken_) {
      const auto is_written = [](std::byte byte) { return byte != kUntouched; };
      written += static_cast<std::size_t>(std::count_if(taken.whole, taken.data, is_written));
      written += static_cast<std::size_t>(
          std::count_if(taken.data + taken.size_bytes, taken.whole + taken.whole_bytes, is_written));
    }
    taken_.clear();
    heap_.clear();
    shared_.clear();
    kept_bytes_ = 0;
    return written;
  }

 private:
  static constexpr std::size_t kMargin = 64;
  static constexpr std::size_t kKeptBytes = std::size_t{1} << 21;
  static constexpr std::byte kUntouched{0xa5};

  struct Taken {
    std::byte* whole;
    std::byte* data;
    std::size_t size_bytes;
    std::size_t whole_bytes;
  };

  std::byte* whole_of(Placement placement, std::size_t whole_bytes) {
    if (placement == Placement::kHeap) {
      heap_.push_back(std::make_unique<std::byte[]>(whole_bytes + 63));
      const auto address = reinterpret_cast<std::uintptr_t>(heap_.back().get());
      return heap_.back().get() + (64 - address % 64) % 64;
    }
    if (placement == Placement::kShared || whole_bytes > kKeptBytes - kept_bytes_) {
      shared_.push_back(communicator_.allocate(whole_bytes));
      return static_cast<std::byte*>(shared_.back()->data());
    }
    if (!kept_) {
      kept_ = communicator_.allocate(kKeptBytes);
    }
    kept_bytes_ += whole_bytes;
    return static_cast<std::byte*>(kept_->data()) + (kept_bytes_ - whole_bytes);
  }

  Communicator& communicator_;
  std::vector<Taken> taken_;
  std::vector<std::unique_ptr<std::byte[]>> heap_;
  std::vector<std::shared_ptr<Buffer>> shared_;
  std::shared_ptr<Buffer> kept_;
  std::size_t kept_bytes_ = 0;
};

// A table of random words; blocks begin at different places of it, so that no two are mixed up unnoticed.
inline constexpr std::size_t kNoiseWords = 65521;

inline std::uint64_t mix(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

template <class T>
const std::vector<T>& noise() {
  static const std::vector<T> instance = [] {
    std::vector<T> words(kNoiseWords);
    for (std::size_t i = 0; i < kNoiseWords; ++i) {
      const std::uint64_t bits = mix((i + 1) * 0x9e3779b97f4a7c15u);
      if constexpr (std::is_same_v<T, Boolean>) {
        words[i].value = bits & 1;
      } else if constexpr (std::is_integral_v<T>) {
        words[i] = static_cast<T>(bits);
      } else {
        words[i] = narrow<T>(static_cast<decltype(widen(T{}))>(static_cast<std::int32_t>(bits)) * 0x1p-29f);
      }
    }
    return words;
  }();
  return instance;
}

// The values of the block that rank `from` has for rank `to`.
template <class T>
class Values {
 public:
  Values(unsigned seed, int from, int to)
      : begin_(mix(seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(from) * 0xbf58476d1ce4e5b9u +
                   static_cast<std::uint64_t>(to) * 0x94d049bb133111ebu) %
               kNoiseWords) {}
  T operator[](std::size_t index) const { return noise_[(begin_ + index) % kNoiseWords]; }

 private:
  const std::vector<T>& noise_ = noise<T>();
  std::size_t begin_;
};

// The reduction of what all ranks have for rank `to`.
template <class T>
class Reduced {
 public:
  Reduced(const Step& step, int size, int to) : op_(step.op), size_(size) {
    for (int from = 0; from < size; ++from) {
      values_.emplace_back(step.seed, from, to);
    }
  }
  T operator[](std::size_t index) const {
    auto value = prepared(0, index);
    for (int from = 1; from < size_; ++from) {
      value = combine(op_, value, prepared(from, index));
    }
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      value = op_ == ReduceOp::kAvg ? value * static_cast<decltype(value)>(1.0 / size_) : value;
    }
    return narrow<T>(value);
  }

 private:
  auto prepared(int from, std::size_t index) const {
    auto value = widen(values_[static_cast<std::size_t>(from)][index]);
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      if (op_ == ReduceOp::kPreMulSum) {
        volatile auto product = value * static_cast<decltype(value)>(step_factor(from));  // not fused with the addition
        value = product;
      }
    }
    return value;
  }

  ReduceOp op_;
  int size_;
  std::vector<Values<T>> values_;
};

}  // namespace accelerate_cpp::comm::testing
