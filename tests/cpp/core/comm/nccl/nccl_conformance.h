// The conformance suite of communicators, less what NCCL has no words for.
#pragma once

#include "core/comm/communicator_conformance.h"
#include "core/comm/nccl/nccl_types.h"

namespace accelerate_cpp::comm::testing {

inline bool nccl_can_reduce(DType dtype, ReduceOp op) {
  try {
    nccl_reduction(dtype, op);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

inline void check_nccl_reductions(Communicator& communicator) {
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                              ReduceOp::kPreMulSum, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      if (nccl_can_reduce(dtype, op)) {
        check_all_reduce(communicator, 333, dtype, op, false);
        check_all_reduce(communicator, 40001, dtype, op, false);
      } else {
        EXPECT_THROW(communicator.all_reduce(Operand(1, dtype).view(), op, soon()), InvalidArgument);
      }
    }
  }
}

inline void check_all_of_nccl(Communicator& communicator) {
  for (const std::size_t count : {0, 1, 17, 5000, 70001}) {
    const int root = static_cast<int>(count) % communicator.size();
    check_all_reduce(communicator, count, DType::kFloat32, ReduceOp::kSum, false);
    check_reduce(communicator, count, root, false);
    check_broadcast(communicator, count, root, false);
    for (const bool equal : {true, false}) {
      check_gathers(communicator, count, equal, communicator.size() - 1, false);
      check_scatters(communicator, count, equal, communicator.size() / 2, false);
      check_all_to_all(communicator, count, equal, false);
    }
    if (communicator.size() > 1) {
      check_point_to_point(communicator, count);
    }
  }
  check_nccl_reductions(communicator);
  communicator.barrier(soon());
  check_split(communicator);
  check_gradient_exchange(communicator);
  EXPECT_THROW(communicator.broadcast(Operand(1, DType::kInt8).view(), communicator.size(), soon()), InvalidArgument);
  EXPECT_THROW(communicator.send(Operand(1, DType::kInt8).view(), communicator.rank(), 0, soon()), InvalidArgument);
  communicator.barrier(soon());
}

}  // namespace accelerate_cpp::comm::testing
