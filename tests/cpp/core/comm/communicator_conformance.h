// What every Communicator must do. Each check is run by one rank and compares with a plain computation, which any rank
// can make because operands are functions of (rank, index). An implementation calls check_all() from each of its ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/base/view_parts.h"
#include "core/comm/communicator.h"
#include "core/comm/operands.h"
#include "core/comm/ranks.h"
#include "core/grad/gradient_exchange_conformance.h"
#include "core/grad/make_gradient_exchange.h"

namespace accelerate_cpp::comm::testing {

// What rank `rank` multiplies its operand with in a pre-multiplied sum.
inline double factor(int rank) {
  return 0.5 + rank;
}

inline double reduced(int size, std::size_t index, DType dtype, ReduceOp op) {
  const double first = operand(0, index, dtype);
  double result = op == ReduceOp::kPreMulSum ? factor(0) * first : first;
  for (int rank = 1; rank < size; ++rank) {
    const double next = operand(rank, index, dtype);
    const auto a = static_cast<std::int64_t>(result);
    const auto b = static_cast<std::int64_t>(next);
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
      case ReduceOp::kPreMulSum:
        result += factor(rank) * next;
        break;
      case ReduceOp::kBitAnd:
        result = static_cast<double>(a & b);
        break;
      case ReduceOp::kBitOr:
        result = static_cast<double>(a | b);
        break;
      case ReduceOp::kBitXor:
        result = static_cast<double>(a ^ b);
        break;
    }
  }
  return op == ReduceOp::kAvg ? result / size : result;
}

inline void check_all_reduce(Communicator& communicator, std::size_t count, DType dtype, ReduceOp op, bool in_arena) {
  Operand data = in_arena ? Operand(communicator, count, dtype) : Operand(count, dtype);
  communicator.all_reduce(data.fill(communicator.rank()).view(), {op, factor(communicator.rank())}, soon());
  const double tolerance = op == ReduceOp::kAvg ? (dtype == DType::kBFloat16 ? 0.01 : 0.001) : 0;
  EXPECT_EQ(
      differences(data.view(), tolerance, [&](std::size_t i) { return reduced(communicator.size(), i, dtype, op); }),
      0u)
      << "all_reduce of " << count << " " << name(dtype) << ", op " << static_cast<int>(op) << ", arena " << in_arena;
}

inline void check_reduce(Communicator& communicator, std::size_t count, int root, bool in_arena) {
  const DType dtype = DType::kFloat32;
  Operand data = in_arena ? Operand(communicator, count, dtype) : Operand(count, dtype);
  const int rank = communicator.rank();
  communicator.reduce(data.fill(rank).view(), root, ReduceOp::kSum, soon());
  EXPECT_EQ(differences(data.view(), 0,
                        [&](std::size_t i) {
                          return rank == root ? reduced(communicator.size(), i, dtype, ReduceOp::kSum)
                                              : operand(rank, i, dtype);
                        }),
            0u)
      << "reduce of " << count << " to " << root << ", arena " << in_arena;
}

inline void check_broadcast(Communicator& communicator, std::size_t count, int root, bool in_arena) {
  Operand data = in_arena ? Operand(communicator, count, DType::kInt32) : Operand(count, DType::kInt32);
  communicator.broadcast(data.fill(communicator.rank()).view(), root, soon());
  EXPECT_EQ(differences(data.view(), 0, [&](std::size_t i) { return operand(root, i, DType::kInt32); }), 0u)
      << "broadcast of " << count << " from " << root;
}

// How many elements rank `rank` has when `count` is the size and operands are equal or not.
inline std::size_t share(std::size_t count, int rank, bool equal) {
  return equal ? count : count * static_cast<std::size_t>((rank * 5 + 2) % 4) / 2;
}

inline std::vector<std::size_t> shares(const Communicator& communicator, std::size_t count, bool equal) {
  std::vector<std::size_t> result;
  for (int r = 0; r < communicator.size(); ++r) {
    result.push_back(share(count, r, equal));
  }
  return result;
}

inline void check_gathers(Communicator& communicator, std::size_t count, bool equal, int root, bool in_arena) {
  const DType dtype = DType::kInt16;
  const int rank = communicator.rank();
  const auto value = [&](int r, std::size_t i) { return operand(r, i, dtype); };
  const std::size_t own = share(count, rank, equal);
  Operand input = in_arena ? Operand(communicator, own, dtype) : Operand(own, dtype);
  input.fill(rank);
  Row everything(communicator, shares(communicator, count, equal), dtype, in_arena);
  communicator.all_gather(input.view(), everything.parts(), soon());
  EXPECT_EQ(everything.differences_from(value), 0u) << "all_gather of " << count << ", equal " << equal;
  everything.clear();
  std::memcpy(everything.part(rank).data, input.view().data, input.view().size_bytes());
  communicator.all_gather(everything.part(rank), everything.parts(), soon());
  EXPECT_EQ(everything.differences_from(value), 0u) << "all_gather in place of " << count << ", equal " << equal;
  everything.clear();
  const bool is_root = rank == root;
  communicator.gather(input.view(), is_root ? everything.parts() : std::vector<MemoryView>{}, root, soon());
  if (is_root) {
    EXPECT_EQ(everything.differences_from(value), 0u) << "gather of " << count << ", equal " << equal;
  }
}

inline void check_scatters(Communicator& communicator, std::size_t count, bool equal, int root, bool in_arena) {
  const DType dtype = DType::kFloat32;
  const int rank = communicator.rank();
  const auto first_of = [count](int receiver) { return static_cast<std::size_t>(receiver) * count; };
  Row blocks(communicator, shares(communicator, count, equal), dtype, in_arena);
  blocks.fill([&](int r, std::size_t i) { return operand(rank, first_of(r) + i, dtype); });
  Operand output(share(count, rank, equal), dtype);
  communicator.scatter(rank == root ? blocks.const_parts() : std::vector<ConstMemoryView>{}, output.view(), root,
                       soon());
  EXPECT_EQ(differences(output.view(), 0, [&](std::size_t i) { return operand(root, first_of(rank) + i, dtype); }), 0u)
      << "scatter of " << count << ", equal " << equal;
  const auto sum = [&](std::size_t i) {
    return reduced(communicator.size(), first_of(rank) + i, dtype, ReduceOp::kSum);
  };
  communicator.reduce_scatter(blocks.const_parts(), output.view(), ReduceOp::kSum, soon());
  EXPECT_EQ(differences(output.view(), 0, sum), 0u) << "reduce_scatter of " << count << ", equal " << equal;
  communicator.reduce_scatter(blocks.const_parts(), blocks.part(rank), ReduceOp::kSum, soon());
  EXPECT_EQ(differences(blocks.part(rank), 0, sum), 0u) << "reduce_scatter in place of " << count;
}

inline void check_all_to_all(Communicator& communicator, std::size_t count, bool equal, bool in_arena) {
  const DType dtype = DType::kInt32;
  const int rank = communicator.rank();
  // What goes from one rank to another; nothing between some of them.
  const auto between = [&](int from, int to) {
    return equal ? count : count * static_cast<std::size_t>((from + 2 * to) % 3) / 2;
  };
  std::vector<std::size_t> given;
  std::vector<std::size_t> taken;
  for (int r = 0; r < communicator.size(); ++r) {
    given.push_back(between(rank, r));
    taken.push_back(between(r, rank));
  }
  Row inputs(communicator, given, dtype, in_arena);
  inputs.fill([&](int r, std::size_t i) { return operand(rank + 7 * r, i, dtype); });
  Row outputs(communicator, taken, dtype, in_arena);
  communicator.all_to_all(inputs.const_parts(), outputs.parts(), soon());
  EXPECT_EQ(outputs.differences_from([&](int r, std::size_t i) { return operand(r + 7 * rank, i, dtype); }), 0u)
      << "all_to_all of " << count << ", equal " << equal << ", arena " << in_arena;
}

// Every rank sends to every other before anybody receives, and receives in the opposite order.
inline void check_point_to_point(Communicator& communicator, std::size_t count) {
  const int rank = communicator.rank();
  std::vector<Operand> sent;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (int r = 0; r < communicator.size(); ++r) {
    for (std::uint64_t tag = 0; tag < 2 && r != rank; ++tag) {
      sent.emplace_back(count, DType::kInt16);
      const MemoryView data = sent.back().fill(rank + 10 * static_cast<int>(tag)).view();
      transfers.push_back(communicator.send(data, r, tag, soon()));
    }
  }
  for (int r = communicator.size() - 1; r >= 0; --r) {
    for (int tag = 1; tag >= 0 && r != rank; --tag) {
      Operand received(count, DType::kInt16);
      const auto transfer = communicator.receive(received.view(), r, static_cast<std::uint64_t>(tag), soon());
      transfer->wait(soon());
      EXPECT_EQ(transfer->source(), r);
      EXPECT_TRUE(transfer->poll());
      EXPECT_EQ(differences(received.view(), 0, [&](std::size_t i) { return operand(r + 10 * tag, i, DType::kInt16); }),
                0u)
          << "receive of " << count << " from " << r << " with tag " << tag;
    }
  }
  for (const auto& transfer : transfers) {
    transfer->wait(soon());
  }
}

inline void check_split(Communicator& communicator) {
  const int rank = communicator.rank();
  const int size = communicator.size();
  const bool left_out = size > 2 && rank == size - 1;
  const auto part = communicator.split(left_out ? -1 : rank % 2, -rank, soon());
  ASSERT_EQ(part == nullptr, left_out);
  if (part) {
    std::vector<int> members;  // descending, as the keys say
    for (int r = size - (size > 2 ? 2 : 1); r >= 0; --r) {
      if (r % 2 == rank % 2) {
        members.push_back(r);
      }
    }
    ASSERT_EQ(part->size(), static_cast<int>(members.size()));
    EXPECT_EQ(members[static_cast<std::size_t>(part->rank())], rank);
    Operand data(1, DType::kInt32);
    put(data.view(), 0, rank);
    part->all_reduce(data.view(), ReduceOp::kSum, soon());
    double sum = 0;
    for (const int r : members) {
      sum += r;
    }
    EXPECT_EQ(get(data.view(), 0), sum);
  }
}

inline void check_gradient_exchange(Communicator& communicator) {
  const auto exchange = grad::make_gradient_exchange(communicator, conformance_buckets(), soon());
  check_gradient_exchange(*exchange, communicator.rank(), communicator.size());
}

inline void check_reductions(Communicator& communicator) {
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                              ReduceOp::kPreMulSum, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      const bool floating_only = op == ReduceOp::kAvg || op == ReduceOp::kPreMulSum;
      const bool integer_only = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
      if (is_floating(dtype) ? integer_only : floating_only) {
        Operand data(1, dtype);
        EXPECT_THROW(communicator.all_reduce(data.view(), op, soon()), InvalidArgument);
      } else {
        check_all_reduce(communicator, 333, dtype, op, false);
        check_all_reduce(communicator, 40001, dtype, op, op == ReduceOp::kMax || op == ReduceOp::kPreMulSum);
      }
    }
  }
}

inline void check_meeting(Communicator& communicator) {
  std::vector<int> all(static_cast<std::size_t>(communicator.size()));
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(communicator.meet("all of us", soon()), all);
}

inline void check_all(Communicator& communicator) {
  const std::vector<std::size_t> counts = {0, 1, 17, 5000, 70001, 400000};
  for (const std::size_t count : counts) {
    const int root = static_cast<int>(count) % communicator.size();
    for (const bool in_arena : {false, true}) {
      check_all_reduce(communicator, count, DType::kFloat32, ReduceOp::kSum, in_arena);
      check_reduce(communicator, count, root, in_arena);
      check_broadcast(communicator, count, root, in_arena);
      for (const bool equal : {true, false}) {
        check_gathers(communicator, count, equal, communicator.size() - 1, in_arena);
        check_scatters(communicator, count, equal, communicator.size() / 2, in_arena);
        check_all_to_all(communicator, count, equal, in_arena);
      }
    }
    if (communicator.size() > 1) {
      check_point_to_point(communicator, count);
    }
  }
  check_reductions(communicator);
  communicator.barrier(soon());
  check_split(communicator);
  check_meeting(communicator);
  check_gradient_exchange(communicator);
  EXPECT_THROW(communicator.broadcast(Operand(1, DType::kInt8).view(), communicator.size(), soon()), InvalidArgument);
  EXPECT_THROW(communicator.send(Operand(1, DType::kInt8).view(), communicator.rank(), 0, soon()), InvalidArgument);
  communicator.barrier(soon());
}

}  // namespace accelerate_cpp::comm::testing
