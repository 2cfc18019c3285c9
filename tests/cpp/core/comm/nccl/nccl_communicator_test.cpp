#include "core/comm/nccl/nccl_communicator.h"
#include "core/grad/make_gradient_exchange.h"

#include <thread>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_conformance.h"
#include "core/comm/nccl/on_doubles.h"
#include "core/comm/nccl/staged_communicator.h"

namespace accelerate_cpp::comm::testing {

using namespace grad;
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class NcclCommunicatorTest : public OnDoubles {};

class NcclConformanceInSlowMotion : public OnDoubles {
 protected:
  static void check(int size, const Change& change) {
    run_threads(size, [&](Store& store, int rank) {
      NcclOptions of_rank = options(rank);
      change(of_rank);
      StagedCommunicator communicator(NcclCommunicator::connect(borrowed(store), rank, size, of_rank, soon()),
                                      device(rank));
      check_all_of_nccl(communicator);
    });
  }
};

class NcclConformance : public NcclConformanceInSlowMotion, public ::testing::WithParamInterface<int> {};

TEST_P(NcclConformance, HoldsOnTheDoubles) {
  check(GetParam(), [](NcclOptions&) {});
  EXPECT_THAT(gpu_double().calls, Contains("ncclCommFinalize 0"));
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 0u);
}

TEST_P(NcclConformance, HoldsWithoutComparingCalls) {
  check(GetParam(), [](NcclOptions& options) { options.check_calls = false; });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclConformance, ::testing::Values(1, 2, 3, 4));

TEST_F(NcclConformanceInSlowMotion, Holds) {
  nccl_double().polls_until_enqueued = 10;
  check(2, [](NcclOptions&) {});
}

TEST_F(NcclCommunicatorTest, AsksNcclForOneOperationWhenAllPartsAreEquallyLarge) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const auto rank = static_cast<float>(communicator.rank());
    const Numbers<float> row(communicator, {rank, rank, 10 + rank, 10 + rank});
    const std::vector<ConstMemoryView> inputs = {row.part(0, 2), row.part(2, 2)};
    const Numbers<float> sum(communicator, {0, 0});
    communicator.reduce_scatter(inputs, sum.view(), ReduceOp::kSum, soon());
    EXPECT_THAT(sum.values(), ElementsAre(communicator.rank() * 20 + 1, communicator.rank() * 20 + 1));
    const std::vector<MemoryView> outputs = {row.part(0, 2), row.part(2, 2)};
    communicator.all_gather(sum.view(), outputs, soon());
    EXPECT_THAT(row.values(), ElementsAre(1, 1, 21, 21));
  });
  EXPECT_EQ(gpu_double().count_calls("ncclReduceScatter"), 2u);
  EXPECT_EQ(gpu_double().count_calls("ncclReduce"), 0u);
  EXPECT_EQ(gpu_double().count_calls("ncclSend"), 0u);
}

// One rank's parts lie apart, the other's in one piece: both must ask NCCL for the same.
TEST_F(NcclCommunicatorTest, TakesPartsThatLieApart) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const auto rank = static_cast<float>(communicator.rank());
    const Numbers<float> row(communicator, {1 + rank, -1, 5 + rank, -1});
    const std::size_t second = communicator.rank() == 0 ? 2 : 1;
    if (second == 1) {
      *(static_cast<float*>(row.view().data) + 1) = 5 + rank;
    }
    const std::vector<ConstMemoryView> inputs = {row.part(0, 1), row.part(second, 1)};
    const Numbers<float> sum(communicator, {0});
    communicator.reduce_scatter(inputs, sum.view(), ReduceOp::kSum, soon());
    EXPECT_THAT(sum.values(), ElementsAre(communicator.rank() == 0 ? 3 : 11));
    const Numbers<float> all(communicator, {0, -1, 0, -1});
    const std::vector<MemoryView> outputs = {all.part(0, 1), all.part(second, 1)};
    communicator.all_gather(sum.view(), outputs, soon());
    EXPECT_EQ(all.values()[0], 3);
    EXPECT_EQ(all.values()[second], 11);
    EXPECT_EQ(all.values()[3 - second], communicator.rank() == 0 ? -1 : 0);
    EXPECT_EQ(all.values()[3], -1);
  });
}

TEST_F(NcclCommunicatorTest, MultipliesByTheFactorOfEachRank) {
  run_ranks(3, [](NcclCommunicator& communicator) {
    const Numbers<double> data(communicator, {1.0, 2.0}, DType::kFloat64);
    const double factor = communicator.rank() + 0.5;
    communicator.all_reduce(data.view(), {ReduceOp::kPreMulSum, factor}, soon());
    EXPECT_THAT(data.values(), ElementsAre(4.5, 9.0));
    communicator.reduce(data.view(), 1, {ReduceOp::kPreMulSum, factor}, soon());
    EXPECT_EQ(data.values()[0], communicator.rank() == 1 ? 4.5 * 4.5 : 4.5);
  });
}

TEST_F(NcclCommunicatorTest, RefusesWhatNcclCannotReduceBeforeItDoesAnything) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<std::int16_t> shorts(communicator, {1, 2}, DType::kInt16);
    EXPECT_THROW(communicator.all_reduce(shorts.view(), ReduceOp::kSum, soon()), InvalidArgument);
    EXPECT_THROW(communicator.reduce(shorts.view(), 0, ReduceOp::kSum, soon()), InvalidArgument);
    EXPECT_THROW(
        communicator.reduce_scatter({shorts.part(0, 1), shorts.part(1, 1)}, shorts.part(0, 1), ReduceOp::kSum, soon()),
        InvalidArgument);
    communicator.broadcast(shorts.view(), 0, soon());
    EXPECT_THAT(shorts.values(), ElementsAre(1, 2)) << "it copies them, though";
  });
}

TEST_F(NcclCommunicatorTest, RefusesOperandsThatDoNotFit) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {1, 2, 3});
    const MemoryView one = data.part(0, 1);
    const MemoryView two = data.part(1, 2);
    EXPECT_THROW(communicator.all_gather(one, {one}, soon()), InvalidArgument);
    EXPECT_THROW(communicator.all_gather(one, {two, two}, soon()), InvalidArgument);
    EXPECT_THROW(communicator.reduce_scatter({one}, one, ReduceOp::kSum, soon()), InvalidArgument);
    EXPECT_THROW(communicator.reduce_scatter({two, two}, one, ReduceOp::kSum, soon()), InvalidArgument);
    EXPECT_THROW(communicator.all_to_all({}, {one, one}, soon()), InvalidArgument);
    EXPECT_THROW(communicator.all_to_all({one, one}, {two, two}, soon()), InvalidArgument);
    if (communicator.rank() == 0) {
      EXPECT_THROW(communicator.gather(one, {}, 0, soon()), InvalidArgument);
      EXPECT_THROW(communicator.scatter({}, one, 0, soon()), InvalidArgument);
    }
    EXPECT_THROW(communicator.reduce(one, 2, ReduceOp::kSum, soon()), InvalidArgument);
    EXPECT_THROW(communicator.gather(one, {}, -1, soon()), InvalidArgument);
    EXPECT_THROW(communicator.scatter({}, one, 2, soon()), InvalidArgument);
    communicator.barrier(soon());
  });
}

TEST_F(NcclCommunicatorTest, RaisesOnEveryRankWhenSizesOfAPairDiffer) {
  run_ranks(3, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {1, 2, 3, 4, 5, 6, 7, 8});
    const std::size_t own = communicator.rank() == 2 ? 2 : 1;
    const std::vector<MemoryView> outputs = {data.part(0, 1), data.part(1, 1), data.part(2, 1)};
    EXPECT_THAT(message_of<MismatchedCollective>([&] {
                  communicator.gather(data.part(4, own), communicator.rank() == 0 ? outputs : std::vector<MemoryView>{},
                                      0, soon());
                }),
                HasSubstr("rank 2 and rank 0 disagree about a size: 2 elements are given, 1 expected"));
  });
}

TEST_F(NcclCommunicatorTest, MeetsInABarrierWithoutAnOperationOfItsOwnWhenCallsAreCompared) {
  run_ranks(2, [](NcclCommunicator& communicator) { communicator.barrier(soon()); });
  EXPECT_EQ(gpu_double().count_calls("ncclAllReduce"), 0u);
  EXPECT_EQ(gpu_double().count_calls("ncclAllGather"), 2u);
}

TEST_F(NcclCommunicatorTest, AllocatesMemoryOfItsDevice) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const auto buffer = communicator.allocate(1000);
    EXPECT_TRUE(gpu_double().owns(buffer->data(), 1000, communicator.rank()));
    communicator.barrier(soon());
    if (communicator.rank() == 0) {
      gpu_double().fail("cudaMalloc", 1, static_cast<int>(CudaStatus::kMemoryAllocation));
      EXPECT_THROW(communicator.allocate(1000), SystemFailure);
    }
    communicator.barrier(soon());
  });
}

TEST_F(NcclCommunicatorTest, AveragesGradientsInBucketsOnTheDevice) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const auto exchange = make_gradient_exchange(
        communicator, {{DType::kFloat32, 3, {{0, 1}, {1, 2}}}, {DType::kFloat64, 1, {{0, 1}}}}, soon());
    for (int round = 0; round < 2; ++round) {
      auto* const first = static_cast<float*>(exchange->bucket(0).data);
      std::fill_n(first, 3, static_cast<float>(communicator.rank() + round));
      *static_cast<double*>(exchange->bucket(1).data) = 10.0 * communicator.rank();
      exchange->used_slots(0)[0] = communicator.rank() == 1;
      exchange->used_slots(0)[1] = 0;
      exchange->used_slots(1)[0] = communicator.rank() == 0;
      exchange->publish(1);
      exchange->publish(0);
      exchange->finish(soon());
      EXPECT_EQ(first[2], 0.5f + static_cast<float>(round));
      EXPECT_EQ(*static_cast<double*>(exchange->bucket(1).data), 5.0);
      EXPECT_TRUE(exchange->used_anywhere(0, 0));
      EXPECT_FALSE(exchange->used_anywhere(0, 1));
      EXPECT_TRUE(exchange->used_anywhere(1, 0));
    }
  });
}

TEST_F(NcclCommunicatorTest, StopsAnOperationOfAnotherThreadWhenItIsAborted) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    if (communicator.rank() == 0) {
      std::thread aborter([&] {
        while (gpu_double().count_calls("ncclAllReduce") < 1) {
          std::this_thread::yield();
        }
        communicator.abort("the disk is full");
      });
      const Numbers<float> data(communicator, {1});
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.all_reduce(data.view(), ReduceOp::kSum, soon()); }),
                  HasSubstr("the disk is full"));
      aborter.join();
      communicator.abort("again");
    } else {
      while (gpu_double().count_calls("ncclCommAbort") < 1) {
        std::this_thread::yield();
      }
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                AllOf(HasSubstr("rank 0 of 2 (cuda:0) aborted the group: the disk is full"), Not(HasSubstr("again"))));
  });
}

TEST_F(NcclCommunicatorTest, GivesPartsAFailureOfTheirOwn) {
  run_ranks(4, [](NcclCommunicator& communicator) {
    const int rank = communicator.rank();
    const auto part = communicator.split(rank / 2, -rank, soon());
    ASSERT_NE(part, nullptr);
    EXPECT_EQ(part->size(), 2);
    EXPECT_EQ(part->rank(), 1 - rank % 2) << "by descending key";
    if (rank == 0) {
      part->abort("the disk is full");
    }
    if (rank < 2) {
      EXPECT_THROW(part->barrier(soon()), PeerLost);
    } else {
      part->barrier(soon());
    }
    communicator.barrier(soon());
  });
}

TEST_F(NcclCommunicatorTest, SplitsAgainAndAgain) {
  run_ranks(3, [](NcclCommunicator& communicator) {
    const auto all = communicator.split(0, 0, soon());
    const auto some = all->split(communicator.rank() == 1 ? -1 : 4, communicator.rank(), soon());
    EXPECT_EQ(some == nullptr, communicator.rank() == 1);
    if (some != nullptr) {
      const Numbers<float> data(communicator, {static_cast<float>(communicator.rank())});
      some->all_reduce(data.view(), ReduceOp::kSum, soon());
      EXPECT_THAT(data.values(), ElementsAre(2));
    }
    communicator.barrier(soon());
  });
}

TEST_F(NcclCommunicatorTest, WaitsForTheStreamThatTheCallerNames) {
  run_ranks(
      2,
      [](NcclCommunicator& communicator) {
        const Numbers<float> data(communicator, {1});
        communicator.all_reduce(data.view(), ReduceOp::kSum, soon());
        EXPECT_THAT(data.values(), ElementsAre(2));
      },
      [](NcclOptions& options) {
        options.caller_stream = [device = options.device] {
          const GpuDouble::Lock lock(gpu_double().mutex);
          gpu_double().default_streams[device].device = device;
          return static_cast<void*>(&gpu_double().default_streams[device]);
        };
      });
}

TEST_F(NcclCommunicatorTest, RefusesToWorkInAForkedChildAndLeavesTheParentsAlone) {
  run_ranks(1, [](NcclCommunicator& communicator) {
    auto* const buffer = new std::shared_ptr<Buffer>(communicator.allocate(8));
    const pid_t child = start_process({}, 0, [&](Store&, int) {
      const Call call = soon();
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(call); }), HasSubstr("forked"));
      EXPECT_THROW(communicator.send({}, 0, 0, call), InvalidArgument);
      const std::size_t before = gpu_double().calls.size();
      delete buffer;
      communicator.~NcclCommunicator();
      EXPECT_EQ(gpu_double().calls.size(), before);
    });
    EXPECT_EQ(wait_process(child), 0);
    communicator.barrier(soon());
    delete buffer;
  });
}

TEST_F(NcclCommunicatorTest, SaysWhatIsMissing) {
  MemoryStore store;
  NcclOptions without_nccl = options(0);
  without_nccl.nccl_path = "nowhere/libnccl.so.2";
  EXPECT_THAT(
      message_of<SystemFailure>([&] { NcclCommunicator::connect(borrowed(store), 0, 1, without_nccl, soon()); }),
      HasSubstr("nowhere/libnccl.so.2"));
  NcclOptions without_gpu = options(0);
  gpu_double().device_count = 0;
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { NcclCommunicator::connect(borrowed(store), 0, 1, without_gpu, soon()); }),
      HasSubstr("cuda:0 does not exist"));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
