#include "torch_bridge/c10d_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::message_of;
using Tensors = C10dBackend::Tensors;

constexpr milliseconds kTimeout(120000);

// Calls `body` on every rank of a group of `size` threads.
void run_ranks(int size, const std::function<void(C10dBackend& backend, int rank)>& body) {
  testing::run_threads(size, [&](Store& store, int rank) {
    auto communicator = ShmCommunicator::connect(store, rank, size, testing::soon(), {});
    const auto backend = c10::make_intrusive<C10dBackend>(std::move(communicator), "shm", kTimeout);
    body(*backend, rank);
  });
}

c10::intrusive_ptr<C10dBackend> alone() {
  return c10::make_intrusive<C10dBackend>(std::make_shared<SoloCommunicator>(), "shm", kTimeout);
}

at::Tensor filled(double value, at::IntArrayRef sizes = {4}) {
  return at::full(sizes, value, at::kFloat);
}

void expect_equal(const at::Tensor& found, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(found, expected))
      << "found " << found.toString() << " starting with " << found.flatten()[0].item<double>() << ", expected "
      << expected.flatten()[0].item<double>();
}

TEST(C10dBackend, TellsItsNameItsPlaceAndItsTimeout) {
  run_ranks(2, [](C10dBackend& backend, int rank) {
    EXPECT_EQ(backend.getBackendName(), "shm");
    EXPECT_EQ(backend.getRank(), rank);
    EXPECT_EQ(backend.getSize(), 2);
    EXPECT_EQ(backend.getBackendOptions()->timeout, kTimeout);
    backend.setTimeout(milliseconds(7));
    EXPECT_EQ(backend.timeout(), milliseconds(7));
    EXPECT_EQ(backend.getBackendOptions()->timeout, milliseconds(7));
  });
}

TEST(C10dBackend, ReducesInPlaceWithEachOperation) {
  run_ranks(3, [](C10dBackend& backend, int rank) {
    const std::vector<std::pair<::c10d::ReduceOp::RedOpType, double>> cases = {{::c10d::ReduceOp::SUM, 9},
                                                                               {::c10d::ReduceOp::AVG, 3},
                                                                               {::c10d::ReduceOp::MIN, 2},
                                                                               {::c10d::ReduceOp::MAX, 4},
                                                                               {::c10d::ReduceOp::PRODUCT, 24}};
    for (const auto& [op, expected] : cases) {
      Tensors tensors = {filled(rank + 2)};
      ::c10d::AllreduceOptions options;
      options.reduceOp = op;
      backend.allreduce(tensors, options);
      expect_equal(tensors[0], filled(expected));
    }
  });
}

TEST(C10dBackend, WritesResultsIntoStridedTensors) {
  run_ranks(2, [](C10dBackend& backend, int rank) {
    const at::Tensor base = filled(rank + 1, {3, 4});
    Tensors columns = {base.t()};
    backend.allreduce(columns, {});
    expect_equal(base, filled(3, {3, 4}));

    Tensors source = {filled(rank, {3, 4}).t()};
    const at::Tensor home = at::zeros({2, 3, 4}, at::kFloat);
    std::vector<Tensors> outputs = {{home[0].t(), home[1].t()}};
    backend.allgather(outputs, source, {});
    expect_equal(home[0], filled(0, {3, 4}));
    expect_equal(home[1], filled(1, {3, 4}));
  });
}

TEST(C10dBackend, BroadcastsFromTheRootItIsGiven) {
  run_ranks(3, [](C10dBackend& backend, int rank) {
    Tensors tensors = {filled(rank)};
    ::c10d::BroadcastOptions options;
    options.rootRank = 2;
    backend.broadcast(tensors, options);
    expect_equal(tensors[0], filled(2));
  });
}

TEST(C10dBackend, GathersIntoOneTensorInRankOrder) {
  run_ranks(3, [](C10dBackend& backend, int rank) {
    at::Tensor output = at::zeros({3, 4}, at::kFloat);
    at::Tensor input = filled(rank);
    backend._allgather_base(output, input, {});
    for (int peer = 0; peer < 3; ++peer) {
      expect_equal(output[peer], filled(peer));
    }
  });
}

TEST(C10dBackend, GathersAndScattersAtTheRootAlone) {
  run_ranks(2, [](C10dBackend& backend, int rank) {
    Tensors input = {filled(rank)};
    std::vector<Tensors> outputs;
    if (rank == 1) {
      outputs.push_back({filled(-1), filled(-1)});
    }
    ::c10d::GatherOptions gather;
    gather.rootRank = 1;
    backend.gather(outputs, input, gather);
    if (rank == 1) {
      expect_equal(outputs[0][0], filled(0));
      expect_equal(outputs[0][1], filled(1));
    }
    Tensors output = {filled(-1)};
    ::c10d::ScatterOptions scatter;
    scatter.rootRank = 1;
    backend.scatter(output, outputs, scatter);
    expect_equal(output[0], filled(rank));
  });
}

TEST(C10dBackend, ReducesAndScattersListsAndSingleTensorsAlike) {
  run_ranks(2, [](C10dBackend& backend, int rank) {
    Tensors from_list = {filled(-1)};
    std::vector<Tensors> inputs = {{filled(10 + rank), filled(20 + rank)}};
    backend.reduce_scatter(from_list, inputs, {});
    expect_equal(from_list[0], filled(rank == 0 ? 21 : 41));
    at::Tensor from_tensor = at::zeros({4, 2}, at::kFloat).select(1, 0);
    at::Tensor whole = at::stack({filled(10 + rank), filled(20 + rank)});
    backend._reduce_scatter_base(from_tensor, whole, {});
    expect_equal(from_tensor, from_list[0]);
  });
}

TEST(C10dBackend, GivesAFinishedWorkWithTheResults) {
  Tensors tensors = {filled(1)};
  const auto work = alone()->allreduce(tensors, {});
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->wait(milliseconds(1)));
  EXPECT_EQ(work->result().at(0).data_ptr(), tensors[0].data_ptr());
  const auto future = work->getFuture();
  ASSERT_TRUE(future->completed());
  EXPECT_EQ(future->value().toTensorVector().at(0).data_ptr(), tensors[0].data_ptr());
}

// Rank 0 waits in `barrier` in vain; rank 1 comes when that is over.
void expect_timeout(const std::function<void(C10dBackend& backend)>& barrier) {
  std::atomic<bool> over{false};
  run_ranks(2, [&](C10dBackend& backend, int rank) {
    if (rank == 0) {
      EXPECT_THAT(message_of<Timeout>([&] { barrier(backend); }), HasSubstr("waited for rank 1"));
      over = true;
    }
    while (!over) {
      std::this_thread::yield();
    }
    if (rank == 1) {
      EXPECT_THAT(message_of<PeerLost>([&] { backend.barrier({}); }), HasSubstr("rank 0 failed"));
    }
  });
}

TEST(C10dBackend, TimesOutAfterTheTimeoutOfTheCall) {
  expect_timeout([](C10dBackend& backend) {
    ::c10d::BarrierOptions options;
    options.timeout = milliseconds(30);
    backend.barrier(options);
  });
}

TEST(C10dBackend, TimesOutAfterItsOwnTimeoutWhenTheCallHasNone) {
  expect_timeout([](C10dBackend& backend) {
    backend.setTimeout(milliseconds(30));
    backend.barrier({});
  });
}

TEST(C10dBackend, RefusesSeveralTensorsPerProcess) {
  Tensors two = {filled(1), filled(2)};
  const std::string expected = "expected one tensor (or list) per process, found 2";
  EXPECT_THAT(message_of<InvalidArgument>([&] { alone()->allreduce(two, {}); }), HasSubstr("all_reduce: " + expected));
  std::vector<Tensors> lists = {two, two};
  Tensors one = {filled(1)};
  EXPECT_THAT(message_of<InvalidArgument>([&] { alone()->allgather(lists, one, {}); }),
              HasSubstr("all_gather: " + expected));
}

TEST(C10dBackend, RefusesReductionsThatItDoesNotKnow) {
  Tensors tensors = {at::full({2}, 1, at::kInt)};
  ::c10d::AllreduceOptions options;
  options.reduceOp = ::c10d::ReduceOp::BXOR;
  EXPECT_THAT(message_of<InvalidArgument>([&] { alone()->allreduce(tensors, options); }),
              HasSubstr("expected SUM, AVG, MIN, MAX or PRODUCT"));
}

TEST(C10dBackend, LeavesTheRefusalOfOtherOperationsToTorch) {
  at::Tensor data = filled(1);
  std::vector<std::int64_t> splits;
  EXPECT_THAT(message_of<c10::Error>([&] { alone()->alltoall_base(data, data, splits, splits, {}); }),
              HasSubstr("Backend shm does not support alltoall_base"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
