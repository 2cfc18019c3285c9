#include "torch_bridge/c10d_backend.h"

#include <ATen/core/ivalue.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/shared_buffer.h"
#include "torch_bridge/backends.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using testing::alone;
using testing::expect_equal;
using testing::filled;
using ::testing::HasSubstr;
using testing::kTimeout;
using testing::message_of;
using testing::options;
using testing::run_backends;

const auto kLater = options<::c10d::AllreduceOptions>(true);
const auto kNow = options<::c10d::AllreduceOptions>(false);

TEST(C10dBackend, TellsItsNameItsPlaceAndItsTimeout) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    EXPECT_EQ(backend.getBackendName(), "shm");
    EXPECT_EQ(backend.getRank(), rank);
    EXPECT_EQ(backend.getSize(), 2);
    EXPECT_EQ(backend.getBackendOptions()->timeout, kTimeout);
    EXPECT_EQ(backend.getError(), ::c10d::ErrorType::SUCCESS);
    backend.setTimeout(milliseconds(7));
    EXPECT_EQ(backend.timeout(), milliseconds(7));
    EXPECT_EQ(backend.getBackendOptions()->timeout, milliseconds(7));
  });
}

TEST(C10dBackend, CountsOperationsAndWhatThisRankPutsIntoThem) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    EXPECT_TRUE(backend.traffic().totals().empty());
    Tensors whole = {filled(1, {4})};
    Tensors part = {filled(1, {2})};
    std::vector<Tensors> parts = {{filled(0, {2}), filled(0, {2})}};
    backend.allreduce(whole, kNow);
    backend.allreduce(whole, kLater)->wait();
    Tensors two = {filled(1, {1}), filled(1, {3})};
    backend.allreduce_coalesced(two, options<::c10d::AllreduceCoalescedOptions>(false));
    backend.reduce(whole, options<::c10d::ReduceOptions>(false));
    backend.broadcast(whole, options<::c10d::BroadcastOptions>(false));
    backend.allgather(parts, part, options<::c10d::AllgatherOptions>(false));
    backend._allgather_base(whole[0], part[0], options<::c10d::AllgatherOptions>(false));
    backend.reduce_scatter(part, parts, options<::c10d::ReduceScatterOptions>(false));
    backend._reduce_scatter_base(part[0], whole[0], options<::c10d::ReduceScatterOptions>(false));
    std::vector<Tensors> nothing;
    backend.gather(rank == 0 ? parts : nothing, part, options<::c10d::GatherOptions>(false));
    backend.scatter(part, rank == 0 ? parts : nothing, options<::c10d::ScatterOptions>(false));
    two = {filled(1, {2}), filled(1, {2})};
    backend.alltoall(parts[0], two, options<::c10d::AllToAllOptions>(false));
    std::vector<std::int64_t> equal;
    Tensors other = {filled(0, {4})};
    backend.alltoall_base(other[0], whole[0], equal, equal, options<::c10d::AllToAllOptions>(false));
    backend.barrier(options<::c10d::BarrierOptions>(false));
    if (rank == 0) {
      backend.send(whole, 1, 0)->wait();
    } else {
      backend.recv(whole, 0, 0)->wait();
    }
    std::map<std::string, Traffic::Total> expected = {
        {"all_reduce", {4, 48}},     {"reduce", {1, 16}},
        {"broadcast", {1, 16}},      {"all_gather", {2, 16}},
        {"gather", {1, 8}},          {"scatter", {1, rank == 0 ? 16U : 0U}},
        {"barrier", {1, 0}},         {"all_to_all", {2, 32}},
        {"reduce_scatter", {2, 32}}, {rank == 0 ? "send" : "receive", {1, 16}}};
    EXPECT_EQ(backend.traffic().totals(), expected);
  });
}

TEST(C10dBackend, CountsNothingThatItRefuses) {
  const auto backend = alone();
  Tensors none;
  EXPECT_THROW(backend->allreduce(none, kNow), InvalidArgument);
  EXPECT_TRUE(backend->traffic().totals().empty());
}

TEST(C10dBackend, RunsASynchronousCallInItsCaller) {
  const auto backend = alone();
  Tensors tensors = {filled(1)};
  EXPECT_TRUE(backend->allreduce(tensors, kNow)->isCompleted());
}

TEST(C10dBackend, RunsAsynchronousCallsInTheirOrderHoweverTheyAreWaitedFor) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {filled(1)};
    std::vector<WorkPointer> works;
    for (int i = 0; i < 6; ++i) {
      works.push_back(backend.allreduce(tensors, kLater));
    }
    works[static_cast<std::size_t>(2 + 3 * rank)]->wait();
    works[0]->wait();
    backend.allreduce(tensors, kNow);
    EXPECT_TRUE(works[5]->isCompleted()) << "a synchronous call comes after those before it";
    expect_equal(tensors[0], filled(128));
  });
}

TEST(C10dBackend, CompletesWhatNobodyWaitsFor) {
  run_backends(2, [](C10dBackend& backend, int) {
    Tensors tensors = {filled(1)};
    const WorkPointer polled = backend.allreduce(tensors, kLater);
    while (!polled->isCompleted()) {
      std::this_thread::yield();
    }
    expect_equal(tensors[0], filled(2));
    const auto future = backend.allreduce(tensors, kLater)->getFuture();
    future->wait();
    expect_equal(future->value().toTensorVector().at(0), filled(4));
  });
}

TEST(C10dBackend, KeepsTensorsAliveUntilTheirOperationHasEnded) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> watched;
    {
      Tensors tensors = {filled(rank)};
      watched.emplace(tensors[0].getIntrusivePtr());
      backend.allreduce(tensors, kLater);
    }
    backend.barrier(options<::c10d::BarrierOptions>(false));
    EXPECT_TRUE(watched->expired()) << "nothing is kept for longer than needed";
  });
}

TEST(C10dBackend, RemembersWhereAsynchronousCallsWereMade) {
  std::atomic<int> asked{0};
  BackendHooks hooks;
  hooks.call_site = [&] { return "train.py:" + std::to_string(40 + ++asked); };
  run_backends(
      2,
      [](C10dBackend& backend, int rank) {
        Tensors tensors = {filled(0, {rank + 1})};
        const WorkPointer work = backend.allreduce(tensors, kLater);
        EXPECT_THAT(message_of<MismatchedCollective>([&] { work->wait(); }),
                    AllOf(HasSubstr("train.py:41"), HasSubstr("train.py:42")));
      },
      hooks);
  EXPECT_EQ(asked, 2);
}

TEST(C10dBackend, NumbersItsCollectives) {
  const auto backend = alone();
  backend->setSequenceNumberForGroup();
  Tensors tensors = {filled(1)};
  EXPECT_EQ(backend->allreduce(tensors, kNow)->getSequencenumber(), 1u);
  EXPECT_EQ(backend->allreduce(tensors, kLater)->getSequencenumber(), 2u);
  EXPECT_EQ(backend->getSequenceNumberForGroup(), 2u);
}

// Rank 0 waits in `barrier` in vain; rank 1 comes when that is over.
void expect_timeout(const std::function<void(C10dBackend& backend)>& barrier) {
  std::atomic<bool> over{false};
  run_backends(2, [&](C10dBackend& backend, int rank) {
    if (rank == 0) {
      EXPECT_THAT(message_of<Timeout>([&] { barrier(backend); }), HasSubstr("rank 1"));
      EXPECT_EQ(backend.getError(), ::c10d::ErrorType::TIMEOUT);
      over = true;
    }
    while (!over) {
      std::this_thread::yield();
    }
    if (rank == 1) {
      EXPECT_THROW(backend.barrier(options<::c10d::BarrierOptions>(false)), PeerLost);
      EXPECT_EQ(backend.getError(), ::c10d::ErrorType::REMOTE_ERROR);
    }
  });
}

TEST(C10dBackend, TimesOutAfterTheTimeoutOfTheCall) {
  for (const bool asynchronous : {false, true}) {
    expect_timeout([&](C10dBackend& backend) {
      auto call = options<::c10d::BarrierOptions>(asynchronous);
      call.timeout = milliseconds(30);
      backend.barrier(call)->wait();
    });
  }
  expect_timeout([&](C10dBackend& backend) {
    ::c10d::BarrierOptions call;
    call.timeout = milliseconds(30);
    backend.monitoredBarrier(call, true);
  });
}

TEST(C10dBackend, TimesOutAfterItsOwnTimeoutWhenTheCallHasNone) {
  for (const bool asynchronous : {false, true}) {
    expect_timeout([&](C10dBackend& backend) {
      backend.setTimeout(milliseconds(30));
      backend.barrier(options<::c10d::BarrierOptions>(asynchronous))->wait();
    });
  }
}

TEST(C10dBackend, LetsAWaitEndBeforeTheOperation) {
  std::promise<void> over;
  std::shared_future<void> waited = over.get_future().share();
  run_backends(2, [&](C10dBackend& backend, int rank) {
    if (rank == 1) {
      waited.wait();
    }
    const WorkPointer work = backend.barrier(options<::c10d::BarrierOptions>(true));
    if (rank == 0) {
      EXPECT_THROW(work->wait(milliseconds(20)), Timeout);
      EXPECT_FALSE(work->isCompleted());
      over.set_value();
    }
    EXPECT_TRUE(work->wait());
  });
}

TEST(C10dBackend, CollectsCallsIntoOneWork) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    EXPECT_FALSE(backend.supportsCoalescing());
    Tensors sent = {filled(rank)};
    Tensors received = {filled(-1)};
    Tensors reduced = {filled(rank)};
    backend.startCoalescing();
    backend.send(sent, 1 - rank, 0);
    backend.recv(received, 1 - rank, 0);
    backend.allreduce(reduced, kNow);
    const WorkPointer work = backend.endCoalescing();
    work->wait();
    expect_equal(received[0], filled(1 - rank));
    expect_equal(reduced[0], filled(1));
    EXPECT_EQ(work->result().size(), 3u);
    backend.startCoalescing();
    EXPECT_TRUE(backend.endCoalescing()->result().empty()) << "what came before is not collected again";
  });
}

TEST(C10dBackend, RaisesTheErrorsOfCollectedCallsInTheirWork) {
  const auto backend = alone();
  Tensors two = {filled(1), filled(2)};
  backend->startCoalescing();
  backend->allreduce(two, kNow);
  const WorkPointer work = backend->endCoalescing();
  EXPECT_THROW(work->wait(), InvalidArgument);
  EXPECT_THROW(backend->allreduce(two, kNow), InvalidArgument) << "outside of the window they are thrown";
  backend->startCoalescing();
  backend->allreduce(two, kNow);
  backend->startCoalescing();
  EXPECT_TRUE(backend->endCoalescing()->wait()) << "a window that was never closed leaves nothing behind";
}

TEST(C10dBackend, CollectsTheCallsOfOneThreadAlone) {
  const auto backend = alone();
  backend->startCoalescing();
  std::thread([&] {
    Tensors two = {filled(1), filled(2)};
    EXPECT_THROW(backend->allreduce(two, kNow), InvalidArgument);
  }).join();
  EXPECT_TRUE(backend->endCoalescing()->result().empty());
}

TEST(C10dBackend, TranslatesTheExceptionsItThrows) {
  BackendHooks hooks;
  hooks.rethrow = [] {
    try {
      throw;
    } catch (const InvalidArgument&) {
      throw std::range_error("translated");
    }
  };
  const auto backend = alone(hooks);
  Tensors two = {filled(1), filled(2)};
  EXPECT_THROW(backend->allreduce(two, kNow), std::range_error);
  backend->startCoalescing();
  backend->allreduce(two, kNow);
  EXPECT_THROW(backend->endCoalescing()->wait(), std::range_error);
}

TEST(C10dBackend, LetsItsCommunicatorWaitForWhatWasIssuedBefore) {
  run_backends(2, [](C10dBackend& backend, int) {
    Tensors tensors = {filled(1)};
    const WorkPointer before = backend.allreduce(tensors, kLater);
    backend.communicator()->barrier(testing::soon());
    EXPECT_TRUE(before->isCompleted());
    expect_equal(tensors[0], filled(2));
  });
}

TEST(C10dBackend, SplitsIntoBackendsOfSomeOfItsRanks) {
  run_backends(3, [](C10dBackend& backend, int rank) {
    const auto made = c10::make_intrusive<::c10d::Backend::Options>("shm", milliseconds(9000));
    EXPECT_TRUE(backend.supportsSplitting());
    // As torch calls it: a rank that is in no group passes one of them.
    const auto part = backend.split(nullptr, {0, 2}, made);
    ASSERT_EQ(part == nullptr, rank == 1);
    if (part) {
      EXPECT_EQ(part->getRank(), rank / 2);
      EXPECT_EQ(part->getBackendOptions()->timeout, milliseconds(9000));
      Tensors tensors = {filled(rank)};
      part->allreduce(tensors, kNow);
      expect_equal(tensors[0], filled(2));
    }
  });
}

TEST(C10dBackend, FinishesWhatIsUnderWayWhenItIsShutDown) {
  run_backends(2, [](C10dBackend& backend, int) {
    Tensors tensors = {filled(1)};
    const WorkPointer work = backend.allreduce(tensors, kLater);
    backend.shutdown();
    EXPECT_TRUE(work->isCompleted());
    expect_equal(tensors[0], filled(2));
    for (const auto& call : {kNow, kLater}) {
      EXPECT_THAT(message_of<InvalidArgument>([&] { backend.allreduce(tensors, call); }),
                  HasSubstr("this process group was destroyed"));
    }
    backend.shutdown();
    backend.leave();
  });
}

TEST(C10dBackend, SaysWhyItLeavesUnlessAllIsWell) {
  for (const std::string& reason : {std::string(), std::string("its program ended with ValueError")}) {
    run_backends(2, [&](C10dBackend& backend, int rank) {
      if (rank == 0) {
        backend.leave(reason);
      } else {
        EXPECT_THAT(message_of<PeerLost>([&] { backend.barrier(options<::c10d::BarrierOptions>(false)); }),
                    HasSubstr(reason.empty() ? "rank 0 has left the group" : "rank 0 failed: " + reason));
      }
    });
  }
}

TEST(C10dBackend, GivesUpWhatIsUnderWayWhenItLeaves) {
  std::atomic<bool> has_left{false};
  run_backends(2, [&](C10dBackend& backend, int rank) {
    if (rank == 0) {
      const WorkPointer work = backend.barrier(options<::c10d::BarrierOptions>(true));
      work->getFuture();  // begun by the thread, or not
      backend.leave();
      has_left = true;
      EXPECT_TRUE(work->isCompleted());
      EXPECT_FALSE(work->isSuccess());
    } else {
      while (!has_left) {  // else it could complete the barrier
        std::this_thread::yield();
      }
      EXPECT_THAT(message_of<PeerLost>([&] { backend.barrier(options<::c10d::BarrierOptions>(false)); }),
                  HasSubstr("its process ended while an asynchronous operation was under way"));
    }
  });
}

TEST(C10dBackend, MakesEveryRankRaiseWhenItIsAborted) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    if (rank == 0) {
      backend.abort();
    }
    const auto call = [&] { backend.barrier(options<::c10d::BarrierOptions>(true))->wait(); };
    EXPECT_THAT(message_of<PeerLost>(call), HasSubstr("abort() of its process group was called"));
    EXPECT_EQ(backend.getError(), ::c10d::ErrorType::REMOTE_ERROR);
  });
}

TEST(C10dBackend, MayBeDroppedWhileOperationsAreUnderWay) {
  std::vector<WorkPointer> works(2);
  Tensors tensors[2] = {{filled(1)}, {filled(1)}};
  run_backends(2, [&](C10dBackend& backend, int rank) {
    works[static_cast<std::size_t>(rank)] = backend.allreduce(tensors[rank], kLater);
  });
  for (const int rank : {0, 1}) {
    while (!works[static_cast<std::size_t>(rank)]->isCompleted()) {
      std::this_thread::yield();
    }
    expect_equal(tensors[rank][0], filled(2));
  }
}

TEST(C10dBackend, AllocatesTensorsThatAreShared) {
  const auto backend = alone();
  EXPECT_TRUE(backend->supportsTensorAlloc(-1));
  const at::Tensor tensor = backend->allocateTensor(100, at::TensorOptions().dtype(at::kHalf));
  EXPECT_EQ(tensor.numel(), 100);
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
#if defined(ACCELERATE_HAS_SHM)
  EXPECT_TRUE(is_shared(tensor.data_ptr(), tensor.nbytes()));
#endif
  EXPECT_THROW(backend->allocateTensor(1, at::TensorOptions().device(at::kMeta)), InvalidArgument);
}

TEST(C10dBackend, LeavesTheRefusalOfOtherOperationsToTorch) {
  EXPECT_THAT(message_of<c10::Error>([&] { alone()->shrink({}); }), HasSubstr("Backend shm does not support shrink"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
