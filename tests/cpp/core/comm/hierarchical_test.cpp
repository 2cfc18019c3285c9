#include "core/comm/hierarchical.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/communicator_conformance.h"
#include "core/comm/hosts_of_threads.h"
#include "core/comm/operands.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_hosts;
using testing::soon;

// Two hosts of two ranks; ranks dealt out in turn; three ranks and one; three hosts of different sizes.
const std::vector<std::vector<int>> kLayouts = {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2, 1, 0, 0}};

class Layouts : public ::testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Hierarchical, Layouts, ::testing::ValuesIn(kLayouts));

TEST_P(Layouts, ConformToCommunicator) {
  run_hosts(GetParam(), [](Hierarchical& communicator) { testing::check_all(communicator); });
}

TEST_P(Layouts, GiveTheSameBitsOnAllRanks) {
  const int size = static_cast<int>(GetParam().size());
  std::vector<std::vector<float>> results(static_cast<std::size_t>(size));
  run_hosts(GetParam(), [&](Hierarchical& communicator) {
    std::vector<float> data(10007);
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = 1.0f / static_cast<float>(i + 1 + 13 * static_cast<std::size_t>(communicator.rank()));
    }
    communicator.all_reduce({data.data(), data.size(), DType::kFloat32}, ReduceOp::kAvg, soon());
    results[static_cast<std::size_t>(communicator.rank())] = data;
  });
  for (const std::vector<float>& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)), 0);
  }
}

TEST_P(Layouts, AverageOverRanksAndNotOverHosts) {
  run_hosts(GetParam(), [](Hierarchical& communicator) {
    float value = communicator.rank() == 0 ? static_cast<float>(communicator.size()) : 0;
    communicator.all_reduce({&value, 1, DType::kFloat32}, ReduceOp::kAvg, soon());
    EXPECT_NEAR(value, 1, 1e-6);
  });
}

TEST(Hierarchical, TellsItsPlaces) {
  run_hosts({0, 1, 0, 1}, [](Hierarchical& communicator) {
    EXPECT_EQ(communicator.size(), 4);
    EXPECT_EQ(communicator.layout().num_hosts(), 2);
    EXPECT_EQ(communicator.layout().host_of(communicator.rank()), communicator.rank() % 2);
  });
}

TEST(Hierarchical, RaisesAMismatchWithinOneHostOnEveryRankOfAll) {
  run_hosts({0, 0, 1, 1}, [](Hierarchical& communicator) {
    std::int32_t value = 0;
    const MemoryView data{&value, 1, DType::kInt32};
    const std::string message = message_of<MismatchedCollective>(
        [&] { communicator.rank() == 3 ? communicator.barrier(soon()) : communicator.broadcast(data, 0, soon()); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0: broadcast of 1 int32, root 0"), HasSubstr("rank 3: barrier")));
  });
}

TEST(Hierarchical, AsksForThePlaceOfTheCallWhenItReportsAMismatch) {
  testing::run_threads(2, [](Store& store, int rank) {
    WaitHooks hooks;
    hooks.call_site = [rank] { return "rank" + std::to_string(rank) + ".py:3"; };
    const auto communicator = testing::connect_hosts(store, rank, {0, 1}, hooks);
    std::uint8_t value = 0;
    const std::string message =
        message_of<MismatchedCollective>([&] { communicator->broadcast({&value, 1, DType::kUInt8}, rank, soon()); });
    EXPECT_THAT(message, AllOf(HasSubstr("at rank0.py:3"), HasSubstr("at rank1.py:3")));
  });
}

// Every rank but 3, which never comes and aborts, raises PeerLost with the reason, here and later.
TEST(Hierarchical, TellsEveryRankOfEveryHostOfAnAbort) {
  std::atomic<int> raised{0};
  run_hosts({0, 0, 1, 1}, [&](Hierarchical& communicator) {
    if (communicator.rank() == 3) {
      communicator.abort("the disk is full");
    } else {
      const std::string message = message_of<PeerLost>([&] { communicator.barrier(soon()); });
      EXPECT_THAT(message, HasSubstr("the disk is full"));
    }
    ++raised;
    while (raised < 4) {
      std::this_thread::yield();
    }
    EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }),
                AllOf(HasSubstr("cannot run"), HasSubstr("the disk is full")));
  });
}

// Rank 3 leaves without the operation: rank 2 sees it in shared memory, rank 1 on their rail, and rank 0 hears of it.
TEST(Hierarchical, NamesARankThatLeftOnEveryHost) {
  run_hosts({0, 1, 0, 1}, [](Hierarchical& communicator) {
    if (communicator.rank() != 3) {
      const std::string message = message_of<PeerLost>([&] { communicator.barrier(soon()); });
      EXPECT_THAT(message, HasSubstr("rank 3 has left")) << communicator.rank();
    }
  });
}

// Three pieces and a rest, over hosts of equal and of different sizes, where some ranks are on no rail.
TEST(Hierarchical, ReducesOperandsOfSeveralPiecesOverAllRails) {
  for (const std::vector<int>& layout : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1, 1}, {0, 0, 0, 1, 1}}) {
    run_hosts(layout, [&](Hierarchical& communicator) {
      const std::size_t count = (std::size_t{10} << 20) / sizeof(float) + 3;
      std::vector<float> values(count);
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>(testing::operand(communicator.rank(), i, DType::kFloat32));
      }
      communicator.all_reduce({values.data(), count, DType::kFloat32}, ReduceOp::kAvg, soon());
      std::size_t num_wrong = 0;
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (int rank = 0; rank < communicator.size(); ++rank) {
          sum += testing::operand(rank, i, DType::kFloat32);
        }
        num_wrong += std::abs(values[i] - sum / communicator.size()) > 1e-5 ? 1 : 0;
      }
      EXPECT_EQ(num_wrong, 0u) << "rank " << communicator.rank();
    });
  }
}

TEST(Hierarchical, EndsALargeReductionOnEveryRankWhenOneAbortsWithinIt) {
  run_hosts({0, 0, 1, 1}, [&](Hierarchical& communicator) {
    std::vector<float> values(std::size_t{1} << 20, 1.0f);
    if (communicator.rank() == 3) {
      communicator.barrier(soon());
      communicator.abort("the disk is full");
    } else {
      communicator.barrier(soon());
      const auto reduce = [&] {
        communicator.all_reduce({values.data(), values.size(), DType::kFloat32}, ReduceOp::kSum, soon());
      };
      EXPECT_THAT(message_of<PeerLost>(reduce), HasSubstr("the disk is full"));
      EXPECT_THROW(communicator.barrier(soon()), PeerLost);
    }
  });
}

// Messages of the parts, and of groups that a group is split into, call ranks as those of the group do.
TEST(Hierarchical, CallsRanksByTheirNumbersWithinAndBetweenHosts) {
  testing::run_threads(4, [](Store& store, int rank) {
    WaitHooks hooks;
    hooks.numbers = {10, 11, 12, 13};
    const auto communicator = testing::connect_hosts(store, rank, {0, 1, 0, 1}, hooks);
    const auto part = communicator->split(rank == 2 ? -1 : 0, -rank, soon());  // ranks 3, 1 and 0
    if (rank == 2) {
      return;
    }
    if (rank == 3) {
      part->leave();
      return communicator->leave();
    }
    const std::string message = message_of<PeerLost>([&] { part->barrier(soon()); });
    EXPECT_THAT(message, HasSubstr("rank 13 has left"));
    EXPECT_THAT(message, HasSubstr(rank == 1 ? "on rank 11 waited for rank 13" : "rank 13"));
  });
}

TEST(Hierarchical, TimesOutOnEveryHost) {
  std::atomic<int> raised{0};
  run_hosts({0, 0, 1, 1}, [&](Hierarchical& communicator) {
    if (communicator.rank() == 0) {
      EXPECT_THAT(message_of<Timeout>([&] { communicator.barrier(Deadline::after(std::chrono::milliseconds(50))); }),
                  HasSubstr("on rank 0 waited for rank 1"));
    } else if (communicator.rank() > 1) {
      EXPECT_THAT(message_of<PeerLost>([&] { communicator.barrier(soon()); }), HasSubstr("barrier failed on rank 0"));
    }
    ++raised;
    while (raised < 4) {
      std::this_thread::yield();
    }
  });
}

TEST(Hierarchical, ReceivesFromAnyRankOfAnyHost) {
  run_hosts({0, 1, 0, 1}, [](Hierarchical& communicator) {
    const int rank = communicator.rank();
    if (rank == 0) {
      std::vector<int> sums(4);
      for (int i = 0; i < 3; ++i) {
        std::int64_t value = 0;
        const auto transfer = communicator.receive({&value, 1, DType::kInt64}, Communicator::kAnySource, 5, soon());
        transfer->wait(soon());
        EXPECT_EQ(value, 100 + transfer->source());
        sums[static_cast<std::size_t>(transfer->source())] += 1;
      }
      EXPECT_EQ(sums, (std::vector<int>{0, 1, 1, 1}));
    } else {
      const std::int64_t value = 100 + rank;
      communicator.send({&value, 1, DType::kInt64}, 0, 5, soon())->wait(soon());
    }
    communicator.barrier(soon());
  });
}

TEST(Hierarchical, RefusesToWorkInAForkedChildAndLeavesTheGroupAlone) {
  if (testing::kThreadSanitizer || testing::kAddressSanitizer) {
    GTEST_SKIP() << "forks while threads run";
  }
  run_hosts({0, 1, 1}, [](Hierarchical& communicator) {
    const pid_t child = ::fork();
    if (child == 0) {
      communicator.abort("not for a child to say");
      const std::string message = message_of<InvalidArgument>([&] { communicator.barrier(soon()); });
      ::_exit(message.find("was forked from rank") == std::string::npos ? 1 : 0);
    }
    EXPECT_EQ(testing::wait_process(child), 0);
    communicator.barrier(soon());
  });
}

TEST(Hierarchical, RefusesAnAverageOfIntegersOnTheRankThatAsksForIt) {
  run_hosts({0, 1}, [](Hierarchical& communicator) {
    std::int32_t value = 1;
    EXPECT_THROW(communicator.all_reduce({&value, 1, DType::kInt32}, ReduceOp::kAvg, soon()), InvalidArgument);
    communicator.barrier(soon());
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
