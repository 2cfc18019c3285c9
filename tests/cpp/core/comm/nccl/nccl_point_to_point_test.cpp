#include "core/comm/nccl/nccl_point_to_point.h"

#include <memory>
#include <stdexcept>
#include <thread>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Deadline at_once() {
  return Deadline::after(std::chrono::milliseconds(0));
}

class NcclPointToPointTest : public OnDoubles {};

TEST_F(NcclPointToPointTest, LetsBothSendBeforeEitherReceives) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const int peer = 1 - communicator.rank();
    const Numbers<float> sent(communicator, {1.0f + static_cast<float>(communicator.rank()), 5});
    const Numbers<float> received(communicator, {0, 0});
    const auto send = communicator.send(sent.view(), peer, 3, soon());
    const auto receive = communicator.receive(received.view(), peer, 3, soon());
    receive->wait(soon());
    send->wait(soon());
    EXPECT_EQ(received.values(), (std::vector<float>{1.0f + static_cast<float>(peer), 5}));
    EXPECT_EQ(receive->source(), peer);
    EXPECT_EQ(send->source(), communicator.rank());
    EXPECT_TRUE(receive->poll());
  });
}

TEST_F(NcclPointToPointTest, MovesOnDuringCollectivesAndDoesNotDelayThem) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {7});
    if (communicator.rank() == 0) {
      const auto send = communicator.send(data.view(), 1, 0, soon());
      communicator.barrier(soon());  // rank 1 comes here only when it has received
      send->wait(soon());
    } else {
      communicator.receive(data.view(), 0, 0, soon())->wait(soon());
      communicator.barrier(soon());
    }
  });
}

TEST_F(NcclPointToPointTest, RefusesWhatNcclCannotDo) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {7});
    EXPECT_THAT(
        message_of<InvalidArgument>([&] { communicator.receive(data.view(), Communicator::kAnySource, 0, soon()); }),
        HasSubstr("any source"));
    for (const int peer : {communicator.rank(), 2, -2}) {
      EXPECT_THROW(communicator.send(data.view(), peer, 0, soon()), InvalidArgument) << peer;
      EXPECT_THROW(communicator.receive(data.view(), peer, 0, soon()), InvalidArgument) << peer;
    }
    communicator.barrier(soon());
  });
}

TEST_F(NcclPointToPointTest, LeavesATransferPostedWhenOnlyTheWaitTimesOut) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {static_cast<float>(communicator.rank())});
    if (communicator.rank() == 1) {
      const auto receive = communicator.receive(data.view(), 0, 4, soon());
      EXPECT_THAT(message_of<Timeout>([&] { receive->wait(at_once()); }),
                  AllOf(HasSubstr("receive from rank 0 on rank 1 of 2"), HasSubstr("1 float32 with tag 4"),
                        HasSubstr("stays posted")));
      EXPECT_FALSE(receive->poll());
      communicator.barrier(soon());
      receive->wait(soon());
      EXPECT_EQ(data.values(), std::vector<float>{0});
    } else {
      communicator.barrier(soon());
      communicator.send(data.view(), 1, 4, soon())->wait(soon());
    }
  });
}

TEST_F(NcclPointToPointTest, EndsTheGroupWhenADeadlineOfATransferPasses) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {0});
    if (communicator.rank() == 1) {
      const auto other = communicator.receive(data.view(), 0, 5, soon());
      const auto receive = communicator.receive(data.view(), 0, 4, Deadline::after(std::chrono::milliseconds(20)));
      EXPECT_THAT(message_of<Timeout>([&] { receive->wait(soon()); }),
                  AllOf(HasSubstr("receive from rank 0 on rank 1 of 2 (cuda:1) (1 float32 with tag 4)"),
                        HasSubstr("had not ended after")));
      EXPECT_TRUE(other->poll());
      EXPECT_THROW(other->wait(soon()), PeerLost);
      EXPECT_THROW(communicator.receive(data.view(), 0, 6, soon()), PeerLost);
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }), HasSubstr("with tag 4"));
  });
}

TEST_F(NcclPointToPointTest, EndsTransfersWhenTheGroupFails) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {0});
    const auto receive = communicator.receive(data.view(), 1 - communicator.rank(), 0, soon());
    if (communicator.rank() == 0) {
      communicator.abort("the disk is full");
    }
    EXPECT_THAT(message_of<PeerLost>([&] { receive->wait(soon()); }), HasSubstr("the disk is full"));
  });
}

TEST_F(NcclPointToPointTest, EndsTheGroupWhenNcclReportsAnError) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const Numbers<float> data(communicator, {0});
    if (communicator.rank() == 0) {
      gpu_double().fail("ncclGetUniqueId", 1, static_cast<int>(NcclResult::kSystemError));
      const auto send = communicator.send(data.view(), 1, 0, soon());
      EXPECT_THAT(message_of<SystemFailure>([&] { send->wait(soon()); }), HasSubstr("ncclGetUniqueId failed"));
    } else {
      const auto receive = communicator.receive(data.view(), 0, 0, soon());
      EXPECT_THAT(message_of<PeerLost>([&] { receive->wait(soon()); }), HasSubstr("ncclGetUniqueId failed"));
    }
  });
}

TEST_F(NcclPointToPointTest, EndsTransfersThatOutliveTheCommunicatorAndTellsTheOthers) {
  run_threads(2, [](Store& store, int rank) {
    auto communicator = NcclCommunicator::connect(borrowed(store), rank, 2, options(rank), soon());
    const auto memory = communicator->allocate(4);
    const MemoryView data{memory->data(), 1, DType::kFloat32};
    if (rank == 0) {
      const auto receive = communicator->receive(data, 1, 0, soon());
      communicator.reset();
      EXPECT_TRUE(receive->poll());
      EXPECT_THAT(message_of<PeerLost>([&] { receive->wait(soon()); }), HasSubstr("destroyed before it had ended"));
    } else {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator->barrier(soon()); }),
                  HasSubstr("destroyed before it had ended"));
    }
  });
}

TEST_F(NcclPointToPointTest, LetsTheUserInterruptAWaitWithoutEndingTheTransfer) {
  std::atomic<bool> armed{false};
  run_ranks(
      2,
      [&](NcclCommunicator& communicator) {
        const Numbers<float> data(communicator, {0});
        if (communicator.rank() == 1) {
          const auto receive = communicator.receive(data.view(), 0, 0, soon());
          armed = true;
          EXPECT_THROW(receive->wait(soon()), std::out_of_range);
          armed = false;
          EXPECT_FALSE(receive->poll());
          communicator.barrier(soon());
          receive->wait(soon());
        } else {
          communicator.barrier(soon());
          communicator.send(data.view(), 1, 0, soon())->wait(soon());
        }
      },
      [&](NcclOptions& options) {
        options.hooks.probe = [&armed, rank = options.device] {
          if (armed && rank == 1) {
            throw std::out_of_range("Ctrl-C");
          }
        };
      });
}

TEST_F(NcclPointToPointTest, WarnsWhenAWaitIsLong) {
  run_ranks(
      2,
      [](NcclCommunicator& communicator) {
        const Numbers<float> data(communicator, {0});
        if (communicator.rank() == 1) {
          const auto receive = communicator.receive(data.view(), 0, 0, soon());
          EXPECT_THAT(message_of<std::out_of_range>([&] { receive->wait(soon()); }),
                      AllOf(HasSubstr("receive from rank 0"), HasSubstr("goes on waiting")));
          communicator.abort("enough");
        }
      },
      [](NcclOptions& options) {
        options.hooks.warn_after = std::chrono::milliseconds(20);
        options.hooks.warn = [](const std::string& text) {
          if (text.rfind("receive", 0) == 0) {
            throw std::out_of_range(text);
          }
        };
      });
}

TEST_F(NcclPointToPointTest, TakesPostingsAndWaitsFromSeveralThreads) {
  run_ranks(2, [](NcclCommunicator& communicator) {
    const int peer = 1 - communicator.rank();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&communicator, peer, t] {
        const auto tag = static_cast<std::uint64_t>(t);
        const Numbers<float> sent(communicator, {static_cast<float>(t)});
        const Numbers<float> received(communicator, {-1});
        const auto send = communicator.send(sent.view(), peer, tag, soon());
        communicator.receive(received.view(), peer, tag, soon())->wait(soon());
        send->wait(soon());
        EXPECT_EQ(received.values(), std::vector<float>{static_cast<float>(t)});
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
