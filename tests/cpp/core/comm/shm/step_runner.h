// Runs one rank's part in a Step and compares every element of its operands, also of those that must not change.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/comm/shm/steps.h"

namespace accelerate_cpp::comm::testing {

template <class T>
class Part {
 public:
  Part(Communicator& communicator, const Step& step, Memory& memory)
      : communicator_(communicator),
        step_(step),
        memory_(memory),
        rank_(communicator.rank()),
        size_(communicator.size()),
        is_root_(rank_ == step.root) {}

  // The number of elements that are not as they should be.
  std::size_t run() {
    switch (step_.kind) {
      case CallKind::kAllReduce:
      case CallKind::kReduce:
        return reduce();
      case CallKind::kReduceScatter:
        return reduce_scatter();
      case CallKind::kBroadcast:
        return broadcast();
      case CallKind::kAllGather:
      case CallKind::kGather:
        return gather();
      case CallKind::kScatter:
        return scatter();
      case CallKind::kAllToAll:
        return all_to_all();
      default:
        communicator_.barrier(soon());
        return 0;
    }
  }

 private:
  using Counts = std::vector<std::size_t>;
  using Views = std::vector<MemoryView>;

  std::size_t count(int rank) const { return step_.counts[static_cast<std::size_t>(rank)]; }

  MemoryView take(std::size_t count) {
    const Placement placement = step_.placements[static_cast<std::size_t>(rank_)];
    return {memory_.take(placement, count * sizeof(T), step_.shift * sizeof(T)), count, step_.dtype};
  }

  // One tensor per count, or parts of one tensor.
  Views take_row(const Counts& counts) {
    Views views;
    std::size_t total = 0;
    for (const std::size_t count : counts) {
      views.push_back(step_.apart ? take(count) : MemoryView{nullptr, count, step_.dtype});
      total += count;
    }
    if (!step_.apart) {
      std::byte* place = take(total).bytes();
      for (MemoryView& view : views) {
        view.data = place;
        place += view.size_bytes();
      }
    }
    return views;
  }

  MemoryView fill(MemoryView view, int from, int to) {
    const Values<T> values(step_.seed, from, to);
    for (std::size_t i = 0; i < view.count; ++i) {
      static_cast<T*>(view.data)[i] = values[i];
    }
    return view;
  }

  // Fills block r with what this rank has for rank r.
  Views fill_row(Views views) {
    for (std::size_t r = 0; r < views.size(); ++r) {
      fill(views[r], rank_, static_cast<int>(r));
    }
    return views;
  }

  // How far a sum in another order may be from that in the order of ranks, of values up to 4 in size with factors up to
  // 1.5: each addition, and each narrowing, rounds what is at most as large as the sum of all sizes.
  double tolerance() const {
    const int digits = std::is_same_v<T, Float16>    ? 11
                       : std::is_same_v<T, BFloat16> ? 8
                                                     : std::numeric_limits<T>::digits;
    return std::ldexp(6.0 * size_ * (size_ + 2), -digits);
  }

  std::size_t differences(ConstMemoryView view, const Reduced<T>& expected) const {
    if constexpr (std::is_floating_point_v<decltype(widen(T{}))>) {
      if (!step_.exact) {
        std::size_t count = 0;
        for (std::size_t i = 0; i < view.count; ++i) {
          const double found = widen(static_cast<const T*>(view.data)[i]);
          count += std::abs(found - static_cast<double>(widen(expected[i]))) <= tolerance() ? 0 : 1;
        }
        return count;
      }
    }
    return unequal(view, expected);
  }
  template <class Expected>
  static std::size_t unequal(ConstMemoryView view, const Expected& expected) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < view.count; ++i) {
      const T wanted = expected[i];
      count += std::memcmp(static_cast<const T*>(view.data) + i, &wanted, sizeof(T)) == 0 ? 0 : 1;
    }
    return count;
  }
  std::size_t differences(ConstMemoryView view, int from, int to) const {
    return unequal(view, Values<T>(step_.seed, from, to));
  }

  Reduction reduction() const { return {step_.op, step_factor(rank_)}; }

  std::size_t reduce() {
    const MemoryView data = fill(take(count(0)), rank_, 0);
    if (step_.kind == CallKind::kAllReduce) {
      communicator_.all_reduce(data, reduction(), soon());
      return differences(data, Reduced<T>(step_, size_, 0));
    }
    communicator_.reduce(data, step_.root, reduction(), soon());
    return is_root_ ? differences(data, Reduced<T>(step_, size_, 0)) : differences(data, rank_, 0);
  }

  std::size_t reduce_scatter() {
    const Views inputs = fill_row(take_row(step_.counts));
    const MemoryView own = inputs[static_cast<std::size_t>(rank_)];
    const MemoryView output = step_.in_place ? own : take(own.count);
    communicator_.reduce_scatter({inputs.begin(), inputs.end()}, output, reduction(), soon());
    std::size_t wrong = differences(output, Reduced<T>(step_, size_, rank_));
    for (int r = 0; r < size_; ++r) {
      wrong += step_.in_place && r == rank_ ? 0 : differences(inputs[static_cast<std::size_t>(r)], rank_, r);
    }
    return wrong;
  }

  std::size_t broadcast() {
    const MemoryView data = fill(take(count(0)), rank_, 0);
    communicator_.broadcast(data, step_.root, soon());
    return differences(data, step_.root, 0);
  }

  std::size_t gather() {
    const bool to_all = step_.kind == CallKind::kAllGather;
    const Views outputs = to_all || is_root_ ? take_row(step_.counts) : Views{};
    const bool in_place = step_.in_place && !outputs.empty();
    const MemoryView input = fill(in_place ? outputs[static_cast<std::size_t>(rank_)] : take(count(rank_)), rank_, 0);
    if (to_all) {
      communicator_.all_gather(input, outputs, soon());
    } else {
      communicator_.gather(input, outputs, step_.root, soon());
    }
    std::size_t wrong = differences(input, rank_, 0);
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      wrong += differences(outputs[r], static_cast<int>(r), 0);
    }
    return wrong;
  }

  std::size_t scatter() {
    const Views inputs = is_root_ ? fill_row(take_row(step_.counts)) : Views{};
    const bool in_place = step_.in_place && is_root_;
    const MemoryView output = in_place ? inputs[static_cast<std::size_t>(rank_)] : take(count(rank_));
    communicator_.scatter({inputs.begin(), inputs.end()}, output, step_.root, soon());
    std::size_t wrong = differences(output, step_.root, rank_);
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      wrong += differences(inputs[r], rank_, static_cast<int>(r));
    }
    return wrong;
  }

  std::size_t all_to_all() {
    Counts given;
    Counts taken;
    for (int r = 0; r < size_; ++r) {
      given.push_back(count(rank_ * size_ + r));
      taken.push_back(count(r * size_ + rank_));
    }
    const Views inputs = fill_row(take_row(given));
    const Views outputs = take_row(taken);
    communicator_.all_to_all({inputs.begin(), inputs.end()}, outputs, soon());
    std::size_t wrong = 0;
    for (int r = 0; r < size_; ++r) {
      wrong += differences(inputs[static_cast<std::size_t>(r)], rank_, r);
      wrong += differences(outputs[static_cast<std::size_t>(r)], r, rank_);
    }
    return wrong;
  }

  Communicator& communicator_;
  const Step& step_;
  Memory& memory_;
  const int rank_;
  const int size_;
  const bool is_root_;
};

template <class T>
std::size_t wrong_elements_as(Communicator& communicator, const Step& step, Memory& memory) {
  const std::size_t wrong = Part<T>(communicator, step, memory).run();
  return wrong + memory.release();
}

// Runs this rank's part; returns the number of elements that are not as they should be.
inline std::size_t wrong_elements(Communicator& communicator, const Step& step, Memory& memory) {
  switch (step.dtype) {
    case DType::kFloat32:
      return wrong_elements_as<float>(communicator, step, memory);
    case DType::kFloat64:
      return wrong_elements_as<double>(communicator, step, memory);
    case DType::kFloat16:
      return wrong_elements_as<Float16>(communicator, step, memory);
    case DType::kBFloat16:
      return wrong_elements_as<BFloat16>(communicator, step, memory);
    case DType::kInt8:
      return wrong_elements_as<std::int8_t>(communicator, step, memory);
    case DType::kInt16:
      return wrong_elements_as<std::int16_t>(communicator, step, memory);
    case DType::kInt32:
      return wrong_elements_as<std::int32_t>(communicator, step, memory);
    case DType::kInt64:
      return wrong_elements_as<std::int64_t>(communicator, step, memory);
    case DType::kUInt8:
      return wrong_elements_as<std::uint8_t>(communicator, step, memory);
    case DType::kBool:
      return wrong_elements_as<Boolean>(communicator, step, memory);
  }
  return 1;
}

}  // namespace accelerate_cpp::comm::testing
