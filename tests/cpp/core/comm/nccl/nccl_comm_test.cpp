#include "core/comm/nccl/nccl_comm.h"

#include <atomic>
#include <thread>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Floats = std::vector<float>;

Deadline at_once() {
  return Deadline::after(std::chrono::milliseconds(20));
}

class NcclCommTest : public OnDoubles {
 protected:
  // The ranks have 2, 3 and 4.
  template <class T, class Make, class Read>
  static void check_reductions(DType dtype, const Make& make, const Read& read) {
    run_ranks(3, [&](NcclComm& comm, CudaStream stream) {
      const Numbers<T> summed(comm, {make(static_cast<float>(comm.rank() + 2)), make(0.0f)}, dtype);
      const Numbers<T> averaged(comm, summed.values(), dtype);
      comm.all_reduce(summed.view(), ReduceOp::kSum, stream);
      comm.all_reduce(averaged.view(), ReduceOp::kAvg, stream);
      finish(comm, stream);
      EXPECT_EQ(read(summed.values()[0]), 9) << name(dtype);
      EXPECT_EQ(read(averaged.values()[0]), 3) << name(dtype);
    });
  }
};

TEST_F(NcclCommTest, ReducesEveryFloatingDtype) {
  const auto same = [](auto value) { return value; };
  const auto number = [](auto value) { return to_float(value); };
  check_reductions<float>(DType::kFloat32, same, same);
  check_reductions<double>(DType::kFloat64, same, same);
  check_reductions<Float16>(DType::kFloat16, to_float16, number);
  check_reductions<BFloat16>(DType::kBFloat16, to_bfloat16, number);
}

TEST_F(NcclCommTest, ReducesGathersAndBroadcastsOverTheRanks) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](NcclComm& comm, CudaStream stream) {
      const int rank = comm.rank();
      Floats parts;
      Floats sums;
      std::vector<std::int16_t> ranks;
      for (int r = 0; r < size; ++r) {
        parts.push_back(static_cast<float>(10 * r + rank));
        ranks.push_back(static_cast<std::int16_t>(r));
      }
      const Numbers<float> input(comm, parts);
      const Numbers<float> part(comm, {0});
      comm.reduce_scatter(input.view(), part.view(), ReduceOp::kSum, stream);
      const Numbers<std::int16_t> own(comm, {static_cast<std::int16_t>(rank)}, DType::kInt16);
      const Numbers<std::int16_t> all(comm, std::vector<std::int16_t>(static_cast<std::size_t>(size)), DType::kInt16);
      comm.all_gather(own.view(), all.view(), stream);
      const Numbers<float> last(comm, {static_cast<float>(rank), 7});
      comm.broadcast(last.view(), size - 1, stream);
      finish(comm, stream);
      EXPECT_THAT(part.values(), ElementsAre(10 * rank * size + size * (size - 1) / 2));
      EXPECT_EQ(all.values(), ranks);
      EXPECT_THAT(last.values(), ElementsAre(size - 1, 7));
    });
  }
}

TEST_F(NcclCommTest, ReturnsBeforeTheStreamHasComeToTheCallAndReadsWhatWasWrittenUntilThen) {
  run_ranks(2, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {0});
    const auto held = gpu_double().hold(stream);
    gpu_double().enqueue(stream, [&] {
      *numbers.data() = static_cast<float>(comm.rank() + 1);
      return true;
    });
    comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
    DeviceEvent done(comm.context().device);
    done.record(stream);
    EXPECT_FALSE(done.passed());
    float seen = 0;
    DeviceStream other(comm.context().device);
    done.hold_back(other.get());
    gpu_double().enqueue(other.get(), [&] {
      seen = *numbers.data();
      return true;
    });
    gpu_double().release(held);
    finish(comm, other.get());
    EXPECT_EQ(seen, 3);
    EXPECT_TRUE(done.passed());
  });
}

TEST_F(NcclCommTest, AnEventPassesOnlyWhenAllRanksHaveMadeTheCall) {
  std::atomic<bool> looked{false};
  run_ranks(2, [&](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    while (comm.rank() == 1 && !looked) {
      std::this_thread::yield();
    }
    comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
    if (comm.rank() == 0) {
      EXPECT_FALSE(gpu_double().idle(stream));
      looked = true;
    }
    finish(comm, stream);
    EXPECT_EQ(*numbers.data(), 2);
  });
}

TEST_F(NcclCommTest, SendsAndReceivesWithinAGroup) {
  run_ranks(3, [](NcclComm& comm, CudaStream stream) {
    const int next = (comm.rank() + 1) % 3;
    const int before = (comm.rank() + 2) % 3;
    const Numbers<float> sent(comm, {static_cast<float>(comm.rank()), 5});
    const Numbers<float> received(comm, {-1, -1});
    const Numbers<float> sum(comm, {1});
    comm.group([&] {
      comm.send(sent.view(), next, stream);
      comm.receive(received.view(), before, stream);
      comm.all_reduce(sum.view(), ReduceOp::kSum, stream);
    });
    comm.group([] {});
    finish(comm, stream);
    EXPECT_THAT(received.values(), ElementsAre(before, 5));
    EXPECT_THAT(sum.values(), ElementsAre(3));
  });
  EXPECT_EQ(gpu_double().count_calls("ncclGroupStart"), 6u) << "one call of NCCL for the three";
}

TEST_F(NcclCommTest, AGroupThatThrowsIsClosedAndEndsTheCommunicator) {
  run_ranks(1, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    EXPECT_THROW(comm.group([&] {
      comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
      comm.abort("lost interest");
      EXPECT_EQ(nccl_double().leaks(), "1 communicators") << "as long as the group refers to it";
      throw std::runtime_error("halfway");
    }),
                 std::runtime_error);
    EXPECT_EQ(nccl_double().leaks(), "");
    EXPECT_EQ(nccl_double().open_groups, 0);
    EXPECT_EQ(comm.failure(), "lost interest");
  });
}

TEST_F(NcclCommTest, RefusesOperandsThatDoNotFitBeforeNcclIsAsked) {
  run_ranks(2, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> two(comm, {1, 2});
    const Numbers<double> wide(comm, {1}, DType::kFloat64);
    const MemoryView shorts{two.data(), 4, DType::kInt16};
    EXPECT_THAT(message_of<InvalidArgument>([&] { comm.all_reduce(shorts, ReduceOp::kSum, stream); }),
                HasSubstr("reduces floating-point numbers; found int16"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { comm.all_reduce(two.view(), ReduceOp::kBitXor, stream); }),
                HasSubstr("reduces by sum or avg; found bxor"));
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { comm.reduce_scatter(two.view(), two.view(), ReduceOp::kSum, stream); }),
        HasSubstr("expected an input of 2 x 2 elements of float32; found 2 of float32"));
    EXPECT_THROW(comm.reduce_scatter(two.view(), wide.view(), ReduceOp::kSum, stream), InvalidArgument);
    EXPECT_THAT(message_of<InvalidArgument>([&] { comm.all_gather(two.view(), two.view(), stream); }),
                HasSubstr("expected an output of 2 x 8 bytes; found 8"));
    for (const int nobody : {-1, 2}) {
      EXPECT_THROW(comm.broadcast(two.view(), nobody, stream), InvalidArgument);
      EXPECT_THROW(comm.send(two.view(), nobody, stream), InvalidArgument);
      EXPECT_THAT(message_of<InvalidArgument>([&] { comm.receive(two.view(), nobody, stream); }),
                  HasSubstr("of 2 (cuda:" + std::to_string(comm.rank()) + "): there is no rank"));
    }
    EXPECT_EQ(comm.failure(), "");
  });
  EXPECT_EQ(gpu_double().count_calls("ncclGroupStart"), 0u);
}

TEST_F(NcclCommTest, JoinsUntilTheDeadlineAndLeavesNothingBehind) {
  MemoryStore store;
  EXPECT_THAT(message_of<Timeout>([&] { NcclComm::connect(store, 0, 2, context(), at_once()); }),
              AllOf(HasSubstr("not all ranks have come after"), HasSubstr("on rank 0 of 2 (cuda:0)")));
  EXPECT_THROW(NcclComm::connect(store, 1, 2, context(), at_once(), {"another", {}, {}}), Timeout) << "there is no id";
  EXPECT_THROW(NcclComm::connect(store, 2, 2, context(), soon()), InvalidArgument);
  EXPECT_THROW(NcclComm::connect(store, -1, 2, context(), soon()), InvalidArgument);
  gpu_double().fail("ncclCommInitRankConfig", 1, static_cast<int>(NcclResult::kSystemError));
  EXPECT_THROW(NcclComm::connect(store, 0, 1, context(), soon()), SystemFailure);
}

TEST_F(NcclCommTest, PassesOnThatTwoRanksHaveOneDevice) {
  std::atomic<bool> refused{false};
  run_threads(2, [&](Store& store, int rank) {
    NcclOptions options;
    options.probe = [&] {
      if (refused) {
        throw std::runtime_error("given up");
      }
    };
    if (rank == 0) {
      EXPECT_THROW(NcclComm::connect(store, 0, 2, context(0), soon(), options), std::runtime_error);
      return;
    }
    while (!gpu_double().was_called("ncclCommInitRankConfig")) {
      std::this_thread::yield();
    }
    EXPECT_THAT(message_of<InvalidArgument>([&] { NcclComm::connect(store, 1, 2, context(0), soon()); }),
                HasSubstr("Duplicate GPU"));
    refused = true;
  });
}

TEST_F(NcclCommTest, LetsTheUserInterruptAWait) {
  NcclOptions options;
  options.probe = [] { throw std::runtime_error("Ctrl-C"); };
  MemoryStore store;
  EXPECT_THAT(message_of<std::runtime_error>([&] { NcclComm::connect(store, 0, 2, context(), soon(), options); }),
              "Ctrl-C");
}

TEST_F(NcclCommTest, AWaitForARankThatNeverComesTimesOutAndFreesTheStream) {
  nccl_double().polls_until_enqueued = 0;  // so that an operation is on its stream within any timeout
  run_ranks(2,
            [](NcclComm& comm, CudaStream stream) {
              if (comm.rank() == 1) {
                return;  // and leaves, which nobody is told
              }
              const Numbers<float> numbers(comm, {1});
              comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
              EXPECT_THAT(
                  message_of<Timeout>([&] { finish(comm, stream, at_once()); }),
                  AllOf(HasSubstr("work on the GPU has not ended after"), HasSubstr("on rank 0 of 2 (cuda:0)")));
              EXPECT_TRUE(gpu_double().idle(stream));
              EXPECT_THAT(message_of<PeerLost>([&] { comm.all_reduce(numbers.view(), ReduceOp::kSum, stream); }),
                          AllOf(HasSubstr("the communicator has ended: work on the GPU has not ended")));
              EXPECT_THROW(finish(comm, stream), PeerLost) << "what it held is worth nothing";
            },
            {"nccl", std::chrono::milliseconds(50), [] {}});
}

TEST_F(NcclCommTest, AnErrorThatNcclNoticesEndsAWaitAndTheCommunicator) {
  run_ranks(2, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    if (comm.rank() == 0) {
      comm.check();
      comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
      nccl_double().break_rank(0, NcclResult::kRemoteError);
      EXPECT_THAT(message_of<PeerLost>([&] { finish(comm, stream); }),
                  HasSubstr("work on the GPU on rank 0 of 2 (cuda:0) failed"));
      EXPECT_TRUE(gpu_double().idle(stream));
      EXPECT_THROW(comm.check(), PeerLost);
    } else {
      nccl_double().break_rank(1, NcclResult::kSystemError);
      EXPECT_THROW(comm.check(), SystemFailure);
      EXPECT_THAT(comm.failure(), HasSubstr("unhandled system error"));
    }
  });
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 2u);
}

TEST_F(NcclCommTest, AbortUnblocksAWaitOfAnotherThread) {
  std::atomic<bool> waiting{false};
  run_ranks(2, [&](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    if (comm.rank() == 1) {
      comm.abort("out of memory");
      return;
    }
    comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
    std::thread other([&] {
      while (!waiting) {
        std::this_thread::yield();
      }
      comm.abort("out of memory");
    });
    waiting = true;
    EXPECT_THAT(message_of<PeerLost>([&] { finish(comm, stream); }), HasSubstr("has ended: out of memory"));
    other.join();
    comm.abort("too late to be the reason");
    EXPECT_EQ(comm.failure(), "out of memory");
  });
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 2u) << "once per rank";
}

TEST_F(NcclCommTest, ACallThatNcclRefusesOrNeverPutsOnTheStreamEndsTheCommunicator) {
  for (const char* const call : {"ncclAllReduce", "ncclGroupStart", "ncclGroupEnd"}) {
    run_ranks(1, [&](NcclComm& comm, CudaStream stream) {
      const Numbers<float> numbers(comm, {1});
      gpu_double().fail(call, 1, static_cast<int>(NcclResult::kSystemError));
      EXPECT_THAT(message_of<SystemFailure>([&] { comm.all_reduce(numbers.view(), ReduceOp::kSum, stream); }),
                  HasSubstr(std::string(call) + " on rank 0 of 1 (cuda:0) failed"));
      EXPECT_THROW(comm.check(), PeerLost);
    });
    nccl_double().reset();
  }
  run_ranks(1,
            [&](NcclComm& comm, CudaStream stream) {
              const Numbers<float> numbers(comm, {1});
              nccl_double().polls_until_enqueued = 1 << 30;
              EXPECT_THAT(message_of<Timeout>([&] { comm.all_reduce(numbers.view(), ReduceOp::kSum, stream); }),
                          HasSubstr("is not on its stream yet: NCCL may be connecting"));
            },
            {"nccl", std::chrono::milliseconds(20), [] {}});
}

TEST_F(NcclCommTest, LeavesInOrderWhenTheWorkHasEnded) {
  run_ranks(2, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
  });
  EXPECT_THAT(gpu_double().calls, Contains("ncclCommFinalize 0"));
  EXPECT_THAT(gpu_double().calls, Contains("ncclCommDestroy 1"));
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 0u);
  run_ranks(1, [](NcclComm&, CudaStream) {
    gpu_double().fail("ncclCommFinalize", 1, static_cast<int>(NcclResult::kSystemError));
  });
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 1u) << "what cannot be ended in order";
}

TEST_F(NcclCommTest, LeavesByAbortWhileWorkIsStuck) {
  nccl_double().polls_until_enqueued = 0;  // so that an operation is on its stream within any timeout
  run_ranks(2,
            [](NcclComm& comm, CudaStream stream) {
              const Numbers<float> numbers(comm, {1});
              if (comm.rank() == 0) {
                comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
              } else {
                comm.abort("it has other plans");
              }
            },
            {"nccl", std::chrono::milliseconds(30), [] {}});
  EXPECT_THAT(gpu_double().calls, Not(Contains("ncclCommFinalize 0")));
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 2u);
}

TEST_F(NcclCommTest, RegistersWhatItAllocatesAndDeregistersItBeforeItEnds) {
  std::shared_ptr<NcclMemory> kept[2];
  run_ranks(2, [&](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1, 2});
    kept[comm.rank()] = comm.allocate(0);
    EXPECT_TRUE(kept[comm.rank()]->is_registered());
    comm.all_reduce(numbers.view(), ReduceOp::kSum, stream);
    finish(comm, stream);
  });
  EXPECT_EQ(nccl_double().registered_operands, 2u);
  EXPECT_EQ(gpu_double().count_calls("ncclCommDeregister"), 4u);
  EXPECT_EQ(gpu_double().count_calls("cudaMalloc"), 0u);
}

TEST_F(NcclCommTest, ReleasesMemoryOnlyWhenItsWorkHasEnded) {
  run_ranks(2, [&](NcclComm& comm, CudaStream stream) {
    auto numbers = std::make_unique<Numbers<float>>(comm, Floats{1});
    comm.all_reduce(numbers->view(), ReduceOp::kSum, stream);
    numbers.reset();
    EXPECT_TRUE(gpu_double().idle(stream));
  });
}

TEST_F(NcclCommTest, TakesPlainMemoryWhereTheLibraryCannotRegister) {
  MemoryStore store;
  auto old = std::make_shared<NcclApi>(ACCELERATE_NCCL_DOUBLE);
  old->comm_register = nullptr;
  const auto comm = NcclComm::connect(store, 0, 1, {old, device()}, soon());
  DeviceStream stream(comm->context().device);
  {
    const Numbers<float> numbers(*comm, {3});
    EXPECT_FALSE(comm->allocate(8)->is_registered());
    comm->all_reduce(numbers.view(), ReduceOp::kSum, stream.get());
    finish(*comm, stream.get());
    gpu_double().fail("cudaMalloc", 1, static_cast<int>(CudaStatus::kMemoryAllocation));
    EXPECT_THAT(message_of<SystemFailure>([&] { comm->allocate(12345); }), HasSubstr("12345 bytes"));
  }
  EXPECT_EQ(gpu_double().count_calls("ncclMemAlloc"), 0u);
}

TEST_F(NcclCommTest, MemoryThatCannotBeHadOrRegisteredIsNotKept) {
  run_ranks(1, [](NcclComm& comm, CudaStream) {
    gpu_double().fail("ncclMemAlloc", 1, static_cast<int>(NcclResult::kUnhandledCudaError));
    EXPECT_THAT(message_of<SystemFailure>([&] { comm.allocate(12345); }), HasSubstr("ncclMemAlloc of 12345 bytes"));
    gpu_double().fail("ncclCommRegister", 1, static_cast<int>(NcclResult::kSystemError));
    EXPECT_THROW(comm.allocate(8), SystemFailure);
    EXPECT_EQ(gpu_double().count_calls("ncclMemFree"), 1u);
    comm.abort("enough");
    EXPECT_THROW(comm.allocate(8), PeerLost);
  });
}

TEST_F(NcclCommTest, DoesNothingInAForkedChild) {
  run_ranks(1, [](NcclComm& comm, CudaStream stream) {
    const Numbers<float> numbers(comm, {1});
    const pid_t child = start_process({}, 0, [&](Store&, int) {
      const std::size_t before = gpu_double().calls.size();
      EXPECT_THAT(message_of<PeerLost>([&] { comm.all_reduce(numbers.view(), ReduceOp::kSum, stream); }),
                  HasSubstr("this process was forked off"));
      comm.abort("of no use here");
      comm.~NcclComm();
      EXPECT_EQ(gpu_double().calls.size(), before);
    });
    EXPECT_EQ(wait_process(child), 0);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
