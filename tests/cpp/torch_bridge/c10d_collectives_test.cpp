// The collectives of C10dBackend, called synchronously and asynchronously.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "torch_bridge/backends.h"
#include "torch_bridge/pre_mul_sum.h"

namespace accelerate_cpp::comm {
namespace {

using testing::alone;
using testing::expect_equal;
using testing::filled;
using ::testing::HasSubstr;
using testing::message_of;
using testing::options;
using testing::run_backends;

class C10dCollectives : public ::testing::TestWithParam<bool> {
 protected:
  bool asynchronous() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Calls, C10dCollectives, ::testing::Bool(),
                         [](const auto& call) { return call.param ? "Asynchronous" : "Synchronous"; });

void wait(const WorkPointer& work) {
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isSuccess());
}

TEST_P(C10dCollectives, ReduceInPlaceWithEachOperation) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    const std::vector<std::pair<::c10d::ReduceOp, double>> cases = {
        {::c10d::ReduceOp::SUM, 9}, {::c10d::ReduceOp::AVG, 3},      {::c10d::ReduceOp::MIN, 2},
        {::c10d::ReduceOp::MAX, 4}, {::c10d::ReduceOp::PRODUCT, 24}, {testing::pre_mul_sum(2.0), 18}};
    for (const auto& [op, expected] : cases) {
      Tensors tensors = {filled(rank + 2)};
      auto call = options<::c10d::AllreduceOptions>(asynchronous());
      call.reduceOp = op;
      wait(backend.allreduce(tensors, call));
      expect_equal(tensors[0], filled(expected));
    }
    Tensors bits = {filled(1 << rank, {4}, at::kInt)};
    auto call = options<::c10d::AllreduceOptions>(asynchronous());
    call.reduceOp = ::c10d::ReduceOp::BOR;
    wait(backend.allreduce(bits, call));
    expect_equal(bits[0], filled(7, {4}, at::kInt));
  });
}

TEST_P(C10dCollectives, WriteResultsIntoStridedTensors) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    const at::Tensor base = filled(rank + 1, {3, 4});
    Tensors columns = {base.t()};
    wait(backend.allreduce(columns, options<::c10d::AllreduceOptions>(asynchronous())));
    expect_equal(base, filled(3, {3, 4}));

    Tensors source = {filled(rank, {3, 4}).t()};
    const at::Tensor home = at::zeros({2, 3, 4}, at::kFloat);
    std::vector<Tensors> outputs = {{home[0].t(), home[1].t()}};
    wait(backend.allgather(outputs, source, options<::c10d::AllgatherOptions>(asynchronous())));
    expect_equal(home[0], filled(0, {3, 4}));
    expect_equal(home[1], filled(1, {3, 4}));
  });
}

TEST_P(C10dCollectives, ReduceSeveralTensorsAtOnce) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    Tensors tensors = {filled(rank, {5}), filled(2 * rank, {2, 3}, at::kLong), filled(rank, {0})};
    wait(backend.allreduce_coalesced(tensors, options<::c10d::AllreduceCoalescedOptions>(asynchronous())));
    expect_equal(tensors[0], filled(1, {5}));
    expect_equal(tensors[1], filled(2, {2, 3}, at::kLong));
  });
}

TEST_P(C10dCollectives, ReduceAtTheRootAloneAndLeaveTheOthersAlone) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    const at::Tensor base = filled(rank + 1, {2, 3});
    Tensors tensors = {base.t()};
    wait(backend.reduce(tensors, options<::c10d::ReduceOptions>(asynchronous(), 1)));
    expect_equal(base, filled(rank == 1 ? 6 : rank + 1, {2, 3}));
  });
}

TEST_P(C10dCollectives, BroadcastFromTheRootTheyAreGiven) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kUInt16, at::kComplexFloat, at::kBool, at::kFloat8_e5m2}) {
      Tensors tensors = {filled(rank == 2, {3, 5}).to(dtype).t()};
      wait(backend.broadcast(tensors, options<::c10d::BroadcastOptions>(asynchronous(), 2)));
      expect_equal(tensors[0].to(at::kFloat), filled(1, {5, 3}));
    }
  });
}

TEST_P(C10dCollectives, GatherIntoOneTensorInRankOrderEvenInPlace) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    at::Tensor output = at::zeros({3, 4}, at::kFloat);
    at::Tensor input = output[rank];
    input.fill_(rank);
    wait(backend._allgather_base(output, input, options<::c10d::AllgatherOptions>(asynchronous())));
    for (int peer = 0; peer < 3; ++peer) {
      expect_equal(output[peer], filled(peer));
    }
  });
}

TEST_P(C10dCollectives, GatherTensorsOfDifferentSizes) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    Tensors input = {filled(rank, {rank + 1, 2})};
    std::vector<Tensors> outputs = {{filled(-1, {1, 2}), filled(-1, {2, 2}), filled(-1, {3, 2})}};
    wait(backend.allgather(outputs, input, options<::c10d::AllgatherOptions>(asynchronous())));
    for (int peer = 0; peer < 3; ++peer) {
      expect_equal(outputs[0][static_cast<std::size_t>(peer)], filled(peer, {peer + 1, 2}));
    }
  });
}

TEST_P(C10dCollectives, GatherSeveralTensorsAtOnce) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    Tensors inputs = {filled(rank, {3}), filled(10 + rank, {2}, at::kLong)};
    std::vector<Tensors> lists = {{filled(-1, {3}), filled(-1, {2}, at::kLong)},
                                  {filled(-1, {3}), filled(-1, {2}, at::kLong)}};
    wait(backend.allgather_coalesced(lists, inputs, options<::c10d::AllgatherOptions>(asynchronous())));
    Tensors outputs = {filled(-1, {6}), filled(-1, {4}, at::kLong)};
    wait(backend.allgather_into_tensor_coalesced(outputs, inputs, options<::c10d::AllgatherOptions>(asynchronous())));
    for (std::size_t i = 0; i < 2; ++i) {
      expect_equal(outputs[i], at::cat({lists[0][i], lists[1][i]}));
    }
    expect_equal(lists[1][1], filled(11, {2}, at::kLong));
  });
}

TEST_P(C10dCollectives, GatherAndScatterAtTheRootAlone) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    Tensors input = {filled(rank)};
    std::vector<Tensors> outputs;
    if (rank == 1) {
      outputs.push_back({filled(-1), filled(-1)});
    }
    const WorkPointer gathered = backend.gather(outputs, input, options<::c10d::GatherOptions>(asynchronous(), 1));
    wait(gathered);
    EXPECT_EQ(gathered->result().size(), rank == 1 ? 2u : 0u);
    if (rank == 1) {
      expect_equal(outputs[0][0], filled(0));
      expect_equal(outputs[0][1], filled(1));
    }
    Tensors output = {filled(-1)};
    wait(backend.scatter(output, outputs, options<::c10d::ScatterOptions>(asynchronous(), 1)));
    expect_equal(output[0], filled(rank));
  });
}

TEST_P(C10dCollectives, ReduceAndScatterListsAndSingleTensorsAlike) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    const auto call = options<::c10d::ReduceScatterOptions>(asynchronous());
    Tensors from_list = {filled(-1)};
    std::vector<Tensors> inputs = {{filled(10 + rank), filled(20 + rank)}};
    wait(backend.reduce_scatter(from_list, inputs, call));
    expect_equal(from_list[0], filled(rank == 0 ? 21 : 41));
    at::Tensor from_tensor = at::zeros({4, 2}, at::kFloat).select(1, 0);
    at::Tensor whole = at::stack({filled(10 + rank), filled(20 + rank)});
    wait(backend._reduce_scatter_base(from_tensor, whole, call));
    expect_equal(from_tensor, from_list[0]);
    Tensors several = {filled(-1), filled(-1, {1}, at::kLong)};
    Tensors wholes = {whole, at::arange(2, at::kLong)};
    wait(backend.reduce_scatter_tensor_coalesced(several, wholes, call));
    expect_equal(several[0], from_list[0]);
    expect_equal(several[1], filled(2 * rank, {1}, at::kLong));
  });
}

TEST_P(C10dCollectives, ReduceAndScatterListsOfDifferentSizes) {
  run_backends(3, [this](C10dBackend& backend, int rank) {
    std::vector<Tensors> inputs = {{filled(1, {5}), filled(2, {0}), filled(3, {2})}};
    Tensors output = {filled(-1, {rank == 0 ? 5 : rank == 1 ? 0 : 2})};
    wait(backend.reduce_scatter(output, inputs, options<::c10d::ReduceScatterOptions>(asynchronous())));
    expect_equal(output[0], filled(rank == 0 ? 3 : 9, output[0].sizes()));
  });
}

TEST_P(C10dCollectives, SwapRowsEvenlyUnevenlyAndInPlace) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    const auto call = options<::c10d::AllToAllOptions>(asynchronous());
    std::vector<std::int64_t> none;
    at::Tensor data = at::arange(4, at::kFloat) + 10.0 * rank;
    wait(backend.alltoall_base(data, data, none, none, call));
    expect_equal(data, at::stack({filled(2 * rank, {}), filled(2 * rank + 1, {}), filled(10 + 2 * rank, {}),
                                  filled(11 + 2 * rank, {})}));
    // Rank 0 gives 1 row to itself and 2 to rank 1; rank 1 gives 0 and 3.
    std::vector<std::int64_t> given = rank == 0 ? std::vector<std::int64_t>{1, 2} : std::vector<std::int64_t>{0, 3};
    std::vector<std::int64_t> taken = rank == 0 ? std::vector<std::int64_t>{1, 0} : std::vector<std::int64_t>{2, 3};
    at::Tensor input = filled(rank, {3, 2}, at::kComplexFloat);
    at::Tensor output = filled(-1, {rank == 0 ? 1 : 5, 2}, at::kComplexFloat);
    wait(backend.alltoall_base(output, input, taken, given, call));
    expect_equal(output, rank == 0
                             ? filled(0, {1, 2}, at::kComplexFloat)
                             : at::cat({filled(0, {2, 2}, at::kComplexFloat), filled(1, {3, 2}, at::kComplexFloat)}));
  });
}

TEST_P(C10dCollectives, SwapListsOfTensors) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    Tensors inputs = {filled(10 * rank, {rank + 1}), filled(10 * rank + 1, {3})};
    Tensors outputs = rank == 0 ? Tensors{filled(-1, {1}), filled(-1, {2})} : Tensors{filled(-1, {3}), filled(-1, {3})};
    wait(backend.alltoall(outputs, inputs, options<::c10d::AllToAllOptions>(asynchronous())));
    expect_equal(outputs[0], filled(rank, outputs[0].sizes()));
    expect_equal(outputs[1], filled(10 + rank, outputs[1].sizes()));
  });
}

TEST_P(C10dCollectives, SumSparseTensors) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    const at::Tensor dense = at::zeros({4, 3}, at::kFloat);
    dense[rank].fill_(rank + 1);
    Tensors tensors = {dense.to_sparse()};
    wait(backend.allreduce(tensors, options<::c10d::AllreduceOptions>(asynchronous())));
    at::Tensor expected = at::zeros({4, 3}, at::kFloat);
    expected[0].fill_(1);
    expected[1].fill_(2);
    expect_equal(tensors[0].to_dense(), expected);
  });
}

TEST_P(C10dCollectives, MeetInABarrier) {
  run_backends(3, [this](C10dBackend& backend, int) {
    wait(backend.barrier(options<::c10d::BarrierOptions>(asynchronous())));
    backend.monitoredBarrier(options<::c10d::BarrierOptions>(asynchronous()), true);
  });
}

TEST_P(C10dCollectives, NameTheShapesThatDiffer) {
  run_backends(2, [this](C10dBackend& backend, int rank) {
    Tensors tensors = {rank == 0 ? filled(1, {2, 3}) : filled(1, {3, 2})};
    const auto call = [&] { backend.allreduce(tensors, options<::c10d::AllreduceOptions>(asynchronous()))->wait(); };
    const std::string message = message_of<MismatchedCollective>(call);
    EXPECT_THAT(message, HasSubstr("[2, 3]"));
    EXPECT_THAT(message, HasSubstr("[3, 2]"));
  });
}

// What is wrong with the arguments is said by the call itself.
TEST_P(C10dCollectives, RefuseSeveralTensorsPerProcess) {
  const auto backend = alone();
  Tensors two = {filled(1), filled(2)};
  const std::string expected = "expected one tensor (or list) per process, found 2";
  const auto reduce = [&] { backend->allreduce(two, options<::c10d::AllreduceOptions>(asynchronous())); };
  EXPECT_THAT(message_of<InvalidArgument>(reduce), HasSubstr("all_reduce: " + expected));
  std::vector<Tensors> lists = {two, two};
  Tensors one = {filled(1)};
  const auto gather = [&] { backend->allgather(lists, one, options<::c10d::AllgatherOptions>(asynchronous())); };
  EXPECT_THAT(message_of<InvalidArgument>(gather), HasSubstr("all_gather: " + expected));
}

TEST_P(C10dCollectives, RefuseWhatDoesNotFitTogether) {
  const auto backend = alone();
  at::Tensor three = filled(1, {3});
  at::Tensor four = filled(1, {4});
  const auto gather = options<::c10d::AllgatherOptions>(asynchronous());
  EXPECT_THAT(message_of<InvalidArgument>([&] { backend->_allgather_base(four, three, gather); }),
              HasSubstr("all_gather_into_tensor: the tensor of all ranks"));
  Tensors one = {three};
  Tensors two = {three, four};
  EXPECT_THAT(message_of<InvalidArgument>([&] { backend->allgather_into_tensor_coalesced(two, one, gather); }),
              HasSubstr("expected as many outputs as inputs, found 2 and 1"));
  at::Tensor bytes = filled(1, {3}, at::kUInt16);
  Tensors unsummable = {bytes};
  const auto reduce = options<::c10d::AllreduceOptions>(asynchronous());
  EXPECT_THAT(message_of<InvalidArgument>([&] { backend->allreduce(unsummable, reduce); }), HasSubstr("UInt16"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
