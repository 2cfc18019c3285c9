// What every Communicator must do. Each check is run by one rank and compares with a plain computation, which any rank
// can make because operands are functions of (rank, index). An implementation calls check_all() from each of its ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/half.h"
#include "core/comm/communicator.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm::testing {

inline const std::vector<DType> kAllDTypes = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                                              DType::kInt8,    DType::kInt16,   DType::kInt32,   DType::kInt64,
                                              DType::kUInt8,   DType::kBool};

// Small integers: exact in every dtype, whatever the order of summation.
inline double operand(int rank, std::size_t index, DType dtype) {
  const auto value = static_cast<double>((index * 7 + static_cast<std::size_t>(rank) * 3) % 5);
  return dtype == DType::kBool ? static_cast<double>(value > 2) : value;
}

inline void put(MemoryView view, std::size_t index, double value) {
  std::byte* const place = view.bytes() + index * element_size(view.dtype);
  const auto write = [place](auto element) { std::memcpy(place, &element, sizeof(element)); };
  switch (view.dtype) {
    case DType::kFloat32:
      return write(static_cast<float>(value));
    case DType::kFloat64:
      return write(value);
    case DType::kFloat16:
      return write(to_float16(static_cast<float>(value)));
    case DType::kBFloat16:
      return write(to_bfloat16(static_cast<float>(value)));
    case DType::kInt8:
      return write(static_cast<std::int8_t>(value));
    case DType::kInt16:
      return write(static_cast<std::int16_t>(value));
    case DType::kInt32:
      return write(static_cast<std::int32_t>(value));
    case DType::kInt64:
      return write(static_cast<std::int64_t>(value));
    case DType::kUInt8:
    case DType::kBool:
      return write(static_cast<std::uint8_t>(value));
  }
}

template <class T>
T read_as(const std::byte* place) {
  T element;
  std::memcpy(&element, place, sizeof(element));
  return element;
}

inline double get(ConstMemoryView view, std::size_t index) {
  const std::byte* const place = view.bytes() + index * element_size(view.dtype);
  switch (view.dtype) {
    case DType::kFloat32:
      return read_as<float>(place);
    case DType::kFloat64:
      return read_as<double>(place);
    case DType::kFloat16:
      return to_float(read_as<Float16>(place));
    case DType::kBFloat16:
      return to_float(read_as<BFloat16>(place));
    case DType::kInt8:
      return read_as<std::int8_t>(place);
    case DType::kInt16:
      return read_as<std::int16_t>(place);
    case DType::kInt32:
      return read_as<std::int32_t>(place);
    case DType::kInt64:
      return static_cast<double>(read_as<std::int64_t>(place));
    case DType::kUInt8:
    case DType::kBool:
      return read_as<std::uint8_t>(place);
  }
  return 0;
}

// Memory for an operand, on the heap or from the communicator.
class Operand {
 public:
  Operand(std::size_t count, DType dtype) : heap_(count * element_size(dtype) + 1), view_{heap_.data(), count, dtype} {}
  Operand(Communicator& communicator, std::size_t count, DType dtype)
      : buffer_(communicator.allocate(count * element_size(dtype) + 1)), view_{buffer_->data(), count, dtype} {}

  MemoryView view() const { return view_; }

  Operand& fill(int rank, std::size_t first = 0) {
    for (std::size_t i = 0; i < view_.count; ++i) {
      put(view_, i, operand(rank, first + i, view_.dtype));
    }
    return *this;
  }

 private:
  std::vector<std::byte> heap_;
  std::shared_ptr<Buffer> buffer_;
  MemoryView view_;
};

inline double reduced(int size, std::size_t index, DType dtype, ReduceOp op) {
  double result = operand(0, index, dtype);
  for (int rank = 1; rank < size; ++rank) {
    const double next = operand(rank, index, dtype);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result = dtype == DType::kBool ? std::max(result, next) : result + next;
        break;
      case ReduceOp::kMin:
        result = std::min(result, next);
        break;
      case ReduceOp::kMax:
        result = std::max(result, next);
        break;
      case ReduceOp::kProduct:
        result *= next;
        break;
    }
  }
  return op == ReduceOp::kAvg ? result / size : result;
}

// Counts the elements of `view` that differ from `expected(index)`; averages may be rounded.
template <class Expected>
std::size_t differences(ConstMemoryView view, double tolerance, const Expected& expected) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < view.count; ++i) {
    const double want = expected(i);
    const double error = std::abs(get(view, i) - want);
    count += error <= tolerance * std::abs(want) ? 0 : 1;
  }
  return count;
}

inline void check_all_reduce(Communicator& communicator, std::size_t count, DType dtype, ReduceOp op, bool in_arena) {
  Operand data = in_arena ? Operand(communicator, count, dtype) : Operand(count, dtype);
  communicator.all_reduce(data.fill(communicator.rank()).view(), op, soon());
  const double tolerance = op == ReduceOp::kAvg ? (dtype == DType::kBFloat16 ? 0.01 : 0.001) : 0;
  EXPECT_EQ(
      differences(data.view(), tolerance, [&](std::size_t i) { return reduced(communicator.size(), i, dtype, op); }),
      0u)
      << "all_reduce of " << count << " " << name(dtype) << ", op " << static_cast<int>(op) << ", arena " << in_arena;
}

inline void check_broadcast(Communicator& communicator, std::size_t count, int root, bool in_arena) {
  Operand data = in_arena ? Operand(communicator, count, DType::kInt32) : Operand(count, DType::kInt32);
  communicator.broadcast(data.fill(communicator.rank()).view(), root, soon());
  EXPECT_EQ(differences(data.view(), 0, [&](std::size_t i) { return operand(root, i, DType::kInt32); }), 0u)
      << "broadcast of " << count << " from " << root;
}

inline void check_gathers(Communicator& communicator, std::size_t count, int root, bool in_arena) {
  const DType dtype = DType::kInt16;
  Operand input = in_arena ? Operand(communicator, count, dtype) : Operand(count, dtype);
  input.fill(communicator.rank());
  std::vector<Operand> everything;
  std::vector<MemoryView> views;
  for (int r = 0; r < communicator.size(); ++r) {
    everything.emplace_back(count, dtype);
    views.push_back(everything.back().view());
  }
  const auto check = [&](const char* operation) {
    for (int r = 0; r < communicator.size(); ++r) {
      EXPECT_EQ(differences(views[static_cast<std::size_t>(r)], 0, [&](std::size_t i) { return operand(r, i, dtype); }),
                0u)
          << operation << " of " << count << " from rank " << r;
    }
  };
  communicator.all_gather(input.view(), views, soon());
  check("all_gather");
  for (const MemoryView& view : views) {
    std::memset(view.data, 0, view.size_bytes());
  }
  const bool is_root = communicator.rank() == root;
  communicator.gather(input.view(), is_root ? views : std::vector<MemoryView>{}, root, soon());
  if (is_root) {
    check("gather");
  }
}

inline void check_scatters(Communicator& communicator, std::size_t count, int root) {
  const DType dtype = DType::kFloat32;
  const int rank = communicator.rank();
  const auto first_of = [count](int receiver) { return static_cast<std::size_t>(receiver) * count; };
  std::vector<Operand> blocks;
  std::vector<ConstMemoryView> views;
  for (int r = 0; r < communicator.size(); ++r) {
    blocks.emplace_back(count, dtype);
    views.push_back(blocks.back().fill(rank, first_of(r)).view());
  }
  Operand output(count, dtype);
  communicator.scatter(rank == root ? views : std::vector<ConstMemoryView>{}, output.view(), root, soon());
  EXPECT_EQ(differences(output.view(), 0, [&](std::size_t i) { return operand(root, first_of(rank) + i, dtype); }), 0u)
      << "scatter of " << count;
  communicator.reduce_scatter(views, output.view(), ReduceOp::kSum, soon());
  EXPECT_EQ(differences(
                output.view(), 0,
                [&](std::size_t i) { return reduced(communicator.size(), first_of(rank) + i, dtype, ReduceOp::kSum); }),
            0u)
      << "reduce_scatter of " << count;
}

inline void check_gradient_exchange(Communicator& communicator) {
  const std::vector<BucketSpec> specs = {
      {DType::kFloat32, 100, 2}, {DType::kFloat64, 70000, 3}, {DType::kFloat32, 1, 1}};
  const std::unique_ptr<GradientExchange> exchange = communicator.gradient_exchange(specs, soon());
  for (int round = 0; round < 3; ++round) {
    const bool backwards = (communicator.rank() + round) % 2 == 1;
    for (std::size_t k = 0; k < specs.size(); ++k) {
      const std::size_t b = backwards ? specs.size() - 1 - k : k;
      const MemoryView view = exchange->bucket(b);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 64, 0u);
      for (std::size_t i = 0; i < view.count; ++i) {
        put(view, i, operand(communicator.rank(), i + static_cast<std::size_t>(round), view.dtype));
      }
      std::memset(exchange->used_slots(b), 0, specs[b].num_slots);
      exchange->used_slots(b)[0] = communicator.rank() == communicator.size() - 1;
      exchange->publish(b);
      exchange->progress();
    }
    exchange->finish(soon());
    for (std::size_t b = 0; b < specs.size(); ++b) {
      EXPECT_EQ(differences(exchange->bucket(b), 1e-6,
                            [&](std::size_t i) {
                              return reduced(communicator.size(), i + static_cast<std::size_t>(round), specs[b].dtype,
                                             ReduceOp::kAvg);
                            }),
                0u)
          << "bucket " << b << " in round " << round;
      EXPECT_TRUE(exchange->used_anywhere(b, 0));
      if (specs[b].num_slots > 1) {
        EXPECT_FALSE(exchange->used_anywhere(b, 1));
      }
    }
  }
}

inline void check_all(Communicator& communicator) {
  const std::vector<std::size_t> counts = {0, 1, 17, 5000, 70001, 400000};
  for (const std::size_t count : counts) {
    for (const bool in_arena : {false, true}) {
      check_all_reduce(communicator, count, DType::kFloat32, ReduceOp::kSum, in_arena);
      check_gathers(communicator, count, communicator.size() - 1, in_arena);
      check_broadcast(communicator, count, static_cast<int>(count) % communicator.size(), in_arena);
    }
    check_scatters(communicator, count, communicator.size() / 2);
  }
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      if (op != ReduceOp::kAvg || is_floating(dtype)) {
        check_all_reduce(communicator, 333, dtype, op, false);
        check_all_reduce(communicator, 40001, dtype, op, op == ReduceOp::kMax);
      }
    }
  }
  communicator.barrier(soon());
  check_gradient_exchange(communicator);
  EXPECT_THROW(communicator.broadcast(Operand(1, DType::kInt8).view(), communicator.size(), soon()), InvalidArgument);
  EXPECT_THROW(communicator.all_reduce(Operand(1, DType::kInt8).view(), ReduceOp::kAvg, soon()), InvalidArgument);
  communicator.barrier(soon());
}

}  // namespace accelerate_cpp::comm::testing
