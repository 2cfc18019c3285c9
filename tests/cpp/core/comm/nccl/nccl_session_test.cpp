#include "core/comm/nccl/nccl_session.h"

#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two ranks, each with a session and one float on its device.
class NcclSessionTest : public OnDoubles {
 protected:
  struct Rank {
    std::shared_ptr<NcclGroup> group;
    std::unique_ptr<NcclSession> session;
    std::unique_ptr<CudaMemory> data;

    float& value() { return *reinterpret_cast<float*>(data->data()); }

    void all_reduce(const Call& call, std::uint64_t said = 1) {
      CallRecord record{CallKind::kAllReduce, DType::kFloat32};
      record.count = said;
      session->run(record, call, [&] { issue_all_reduce(); });
    }
    void issue_all_reduce() {
      session->issue("ncclAllReduce", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
        return api.all_reduce(data->data(), data->data(), 1, NcclDataType::kFloat32, NcclRedOp::kSum, comm, stream);
      });
    }
  };

  static Rank join(Store& store, int rank, const NcclOptions& options, Deadline deadline = soon()) {
    Rank made;
    made.group =
        std::make_shared<NcclGroup>(context(rank), GroupBoard(borrowed(store), "group", rank), options, rank, 2);
    made.session = std::make_unique<NcclSession>(
        made.group,
        NcclSession::join(made.group->context(), made.group->board(), rank, 2, deadline, made.group->options().hooks));
    made.data = std::make_unique<CudaMemory>(device(rank), MemoryKind::kDevice, sizeof(float));
    return made;
  }

  static void run_two(
      const std::function<void(Rank& rank, int number)>& body, const Change& change = [](NcclOptions&) {}) {
    run_threads(2, [&](Store& store, int number) {
      NcclOptions of_rank = options(number);
      change(of_rank);
      Rank rank = join(store, number, of_rank);
      rank.value() = static_cast<float>(number + 1);
      body(rank, number);
    });
  }
};

TEST_F(NcclSessionTest, RunsAnOperationToItsEnd) {
  run_two([](Rank& rank, int) {
    rank.all_reduce(soon());
    EXPECT_EQ(rank.value(), 3.0f);
    EXPECT_EQ(rank.session->sequence(), 1u);
    rank.all_reduce(soon());
    EXPECT_EQ(rank.value(), 6.0f);
    EXPECT_EQ(rank.session->sequence(), 2u);
  });
}

TEST_F(NcclSessionTest, StartsAfterTheWorkOnTheCallersStream) {
  run_two([](Rank& rank, int number) {
    if (number == 1) {
      rank.all_reduce(soon());
      EXPECT_EQ(rank.value(), 12.0f);
      return;
    }
    // Rank 0's operand is written by work that is on its default stream when the operation is called.
    const DeviceGuard guard(*rank.group->context().device);
    const auto held = gpu_double().hold(nullptr);
    float ten = 10;
    rank.group->context().device->api().copy_async(rank.data->data(), &ten, sizeof(ten), CudaCopyKind::kDefault,
                                                   nullptr);
    std::thread releaser([&] {
      while (gpu_double().count_calls("ncclAllReduce") < 1) {
        std::this_thread::yield();
      }
      gpu_double().release(held);
    });
    rank.all_reduce(soon());
    releaser.join();
    EXPECT_EQ(rank.value(), 12.0f);
  });
}

TEST_F(NcclSessionTest, TimesOutWhenARankNeverComesToTheOperationAndStopsTheGpu) {
  run_two([](Rank& rank, int number) {
    if (number == 0) {
      EXPECT_THAT(
          message_of<Timeout>(
              [&] { rank.all_reduce(Call(Deadline::after(std::chrono::milliseconds(30)), {}, "t.py:8")); }),
          AllOf(HasSubstr("all_reduce(sum) of 1 float32 (operation 1) on rank 0 of 2 (cuda:0)"),
                HasSubstr("had not finished after"), HasSubstr("rank 1: not known to wait"), HasSubstr("t.py:8")));
      EXPECT_TRUE(gpu_double().was_called("ncclCommAbort 0"));
      EXPECT_THAT(message_of<PeerLost>([&] { rank.all_reduce(soon()); }), HasSubstr("had not finished after"));
    } else {
      while (!rank.group->board().failure().has_value()) {
      }
      EXPECT_THAT(message_of<PeerLost>([&] { rank.all_reduce(soon()); }), HasSubstr("on rank 0 of 2"));
    }
  });
}

TEST_F(NcclSessionTest, GivesAFailureOfOneRankToTheOther) {
  run_two([](Rank& rank, int number) {
    if (number == 0) {
      EXPECT_THROW(rank.session->run({CallKind::kBarrier}, soon(), [] { throw std::runtime_error("out of ideas"); }),
                   std::runtime_error);
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { rank.all_reduce(soon()); }), HasSubstr("out of ideas"));
    }
    EXPECT_THROW(rank.all_reduce(soon()), PeerLost);
  });
}

TEST_F(NcclSessionTest, ReportsAnErrorOfNcclWithItsNameAndEndsTheGroup) {
  run_two([](Rank& rank, int number) {
    if (number == 0) {
      gpu_double().fail("ncclAllReduce", 1, static_cast<int>(NcclResult::kSystemError));
      EXPECT_THAT(message_of<SystemFailure>([&] { rank.all_reduce(soon()); }), HasSubstr("ncclAllReduce failed"));
      rank.group->board().publish("/failed", "yes");
    } else {
      rank.group->board().await("/failed", soon());
      EXPECT_THROW(rank.all_reduce(soon()), PeerLost);
    }
    EXPECT_EQ(nccl_double().open_groups, 0);
  });
}

TEST_F(NcclSessionTest, NoticesAnAsynchronousErrorWhileItWaits) {
  run_two([](Rank& rank, int number) {
    if (number == 0) {
      std::thread breaker([] {
        while (gpu_double().count_calls("ncclAllReduce") < 1) {
          std::this_thread::yield();
        }
        nccl_double().break_rank(0, NcclResult::kRemoteError);
      });
      EXPECT_THROW(rank.all_reduce(soon()), PeerLost);
      breaker.join();
      EXPECT_TRUE(gpu_double().was_called("ncclCommAbort 0"));
      rank.group->board().publish("/done", "");
    } else {
      rank.group->board().await("/done", soon());
      EXPECT_THROW(rank.all_reduce(soon()), PeerLost);
    }
  });
}

TEST_F(NcclSessionTest, RaisesOnBothRanksWhenTheirCallsDifferAndNcclHangs) {
  run_two([](Rank& rank, int number) {
    const auto run = [&] {
      if (number == 0) {
        rank.all_reduce(soon());
      } else {
        rank.session->run({CallKind::kBroadcast, DType::kFloat32}, soon(), [&] {
          rank.session->issue("ncclBroadcast", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
            return api.broadcast(rank.data->data(), rank.data->data(), 4, NcclDataType::kUint8, 0, comm, stream);
          });
        });
      }
    };
    EXPECT_THAT(message_of<MismatchedCollective>(run),
                AllOf(HasSubstr("rank 0: all_reduce(sum) of 1 float32"), HasSubstr("rank 1: broadcast of 0 float32")));
    EXPECT_THROW(rank.all_reduce(soon()), PeerLost) << "the communicator has ended";
  });
}

TEST_F(NcclSessionTest, RaisesOnBothRanksWhenTheirCallsDifferAndNcclDoesNotNotice) {
  run_two(
      [](Rank& rank, int number) {
        const std::uint64_t said = number == 0 ? 1 : 2;
        EXPECT_THAT(message_of<MismatchedCollective>([&] { rank.all_reduce(soon(), said); }),
                    AllOf(HasSubstr("rank 0: all_reduce(sum) of 1 float32"),
                          HasSubstr("rank 1: all_reduce(sum) of 2 float32")));
        rank.value() = 5;
        rank.all_reduce(soon());
        EXPECT_EQ(rank.value(), 10.0f) << "the communicator stays usable";
      },
      [](NcclOptions& options) { options.stall_after = std::chrono::hours(1); });
}

TEST_F(NcclSessionTest, ComparesNothingWhenItIsToldSo) {
  run_two(
      [](Rank& rank, int number) {
        EXPECT_FALSE(rank.session->meets_anyway());
        rank.all_reduce(soon(), number == 0 ? 1 : 2);
        EXPECT_EQ(rank.value(), 3.0f);
      },
      [](NcclOptions& options) {
        options.check_calls = false;
        options.stall_after = std::chrono::hours(1);
      });
  EXPECT_EQ(gpu_double().count_calls("ncclAllGather"), 0u);
}

TEST_F(NcclSessionTest, RaisesWhenARankHasLeft) {
  run_two([](Rank& rank, int number) {
    if (number == 0) {
      while (!rank.group->board().last_operation_of(1).has_value()) {
      }
      EXPECT_THAT(message_of<PeerLost>([&] { rank.all_reduce(soon()); }), HasSubstr("rank 1 has left the group"));
    }
  });
}

TEST_F(NcclSessionTest, LetsTheUserInterruptAndEndsTheGroup) {
  run_two(
      [](Rank& rank, int number) {
        if (number == 0) {
          // Armed only now: joining asks the probe, too.
          EXPECT_THROW(rank.all_reduce(soon()), std::out_of_range);
        } else {
          while (!rank.group->board().failure().has_value()) {
          }
          EXPECT_THROW(rank.all_reduce(soon()), PeerLost);
        }
      },
      [](NcclOptions& options) {
        if (options.device == 0) {
          options.hooks.probe = [] {
            if (gpu_double().count_calls("ncclAllReduce") > 0) {
              throw std::out_of_range("Ctrl-C");
            }
          };
        }
      });
}

TEST_F(NcclSessionTest, KeepsTransfersGoingWhileItWaits) {
  run_two([](Rank& rank, int number) {
    std::size_t looks = 0;
    rank.session->set_meanwhile([&] { ++looks; });
    if (number == 1) {
      rank.group->board().await("/waited", soon());
    } else {
      rank.session->set_meanwhile([&] {
        if (++looks == 3) {
          rank.group->board().publish("/waited", "");
        }
      });
    }
    rank.all_reduce(soon());
    EXPECT_GE(looks, number == 0 ? 3u : 0u);
  });
}

TEST_F(NcclSessionTest, MakesAnOperationForAFactorAndReleasesIt) {
  run_two([](Rank& rank, int number) {
    float factor = number == 0 ? 0.5f : 4.0f;
    rank.session->run({CallKind::kAllReduce}, soon(), [&] {
      rank.session->issue_premul_sum("ncclAllReduce", NcclDataType::kFloat32, &factor,
                                     [&](const NcclApi& api, NcclRedOp op, NcclComm comm, CudaStream stream) {
                                       return api.all_reduce(rank.data->data(), rank.data->data(), 1,
                                                             NcclDataType::kFloat32, op, comm, stream);
                                     });
    });
    EXPECT_EQ(rank.value(), 0.5f * 1 + 4.0f * 2);
  });
  EXPECT_EQ(gpu_double().count_calls("ncclRedOpDestroy"), 2u);
}

TEST_F(NcclSessionTest, RefusesToWaitOutsideOfAnOperation) {
  run_two([](Rank& rank, int) { EXPECT_THROW(rank.issue_all_reduce(), InternalError); });
  gpu_double().problems.clear();
}

TEST_F(NcclSessionTest, TimesOutWhenARankNeverJoins) {
  MemoryStore store;
  EXPECT_THAT(message_of<Timeout>([&] { join(store, 0, options(0), Deadline::after(std::chrono::milliseconds(30))); }),
              AllOf(HasSubstr("joining an NCCL group as rank 0 of 2 (cuda:0)"), HasSubstr("had not finished after")));
  MemoryStore empty;
  EXPECT_THAT(message_of<Timeout>([&] { join(empty, 1, options(1), Deadline::after(std::chrono::milliseconds(30))); }),
              HasSubstr("/id"));
}

TEST_F(NcclSessionTest, TellsTheOtherRanksWhyRankZeroCannotBegin) {
  MemoryStore store;
  gpu_double().fail("ncclGetUniqueId", 1, static_cast<int>(NcclResult::kSystemError));
  EXPECT_THROW(join(store, 0, options(0)), SystemFailure);
  EXPECT_THAT(message_of<PeerLost>([&] { join(store, 1, options(1)); }),
              AllOf(HasSubstr("rank 0 could not begin"), HasSubstr("ncclGetUniqueId failed")));
}

TEST_F(NcclSessionTest, TellsARankThatJoinsThatAnotherOneCannot) {
  run_threads(2, [](Store& store, int number) {
    if (number == 1) {
      GroupBoard(borrowed(store), "group", 1).publish_failure({false, 0, "rank 1 has no GPU"});
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { join(store, 0, options(0)); }), HasSubstr("rank 1 has no GPU"));
    }
  });
}

TEST_F(NcclSessionTest, LetsTheUserInterruptJoining) {
  MemoryStore store;
  NcclOptions impatient = options(0);
  impatient.hooks.probe = [] { throw std::out_of_range("Ctrl-C"); };
  EXPECT_THROW(join(store, 0, impatient), std::out_of_range);
}

TEST_F(NcclSessionTest, WarnsWhenJoiningTakesLong) {
  MemoryStore store;
  NcclOptions impatient = options(0);
  impatient.hooks.warn_after = std::chrono::milliseconds(1);
  impatient.hooks.warn = [](const std::string& text) { throw std::out_of_range(text); };
  EXPECT_THAT(message_of<std::out_of_range>([&] { join(store, 0, impatient); }),
              AllOf(HasSubstr("joining an NCCL group"), HasSubstr("goes on waiting")));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
