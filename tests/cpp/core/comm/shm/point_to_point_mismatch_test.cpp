// Messages that do not fit their receives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/comm/shm/engines.h"
#include "core/comm/shm/point_to_point.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using testing::Engine;
using testing::expect_message;
using ::testing::HasSubstr;
using testing::Integers;
using testing::meet;
using testing::run_engines;
using testing::send;
using testing::soon;
using ::testing::ThrowsMessage;

constexpr int kAny = Communicator::kAnySource;

TEST(PointToPointMismatches, RaiseOnBothSidesAndLeaveTheGroupUsable) {
  run_engines(2, [](Engine& engine) {
    for (const std::size_t count : {std::size_t{5}, std::size_t{100000}}) {
      const std::string sent = "rank 0 sent " + std::to_string(count) + " int32 with tag 3";
      if (engine.rank() == 0) {
        send(engine, 1, 3, Integers(count));
        Integers answer(1);
        EXPECT_THAT([&] { engine.messages->receive(answer.view(), 1, 4, soon())->wait(soon()); },
                    ThrowsMessage<MismatchedCollective>(
                        AllOf(HasSubstr(sent + ", but rank 1 received 4 int32"),
                              HasSubstr("receive of 1 int32 from rank 1 with tag 4 on rank 0"))));
      } else {
        Integers data(4, -1);
        const auto transfer = engine.messages->receive(data.view(), 0, 3, Call(soon(), {}, "train.py:9"));
        const auto told =
            AllOf(HasSubstr(sent), HasSubstr("receive of 4 int32 from rank 0"), HasSubstr("on rank 1 at train.py:9"));
        EXPECT_THAT([&] { transfer->wait(soon()); }, ThrowsMessage<MismatchedCollective>(told));
        EXPECT_THAT([&] { transfer->wait(soon()); }, ThrowsMessage<MismatchedCollective>(told)) << "and again";
        EXPECT_TRUE(transfer->poll());
        data.expect(-1);
      }
      meet(*engine.group);
      engine.rank() == 0 ? send(engine, 1, 3, Integers(count, 6)) : expect_message(engine, 0, 3, count, 6);
    }
  });
}

TEST(PointToPointMismatches, OfTheDTypeAreNoticedAlsoWhenTheSizeInBytesIsRight) {
  run_engines(2, [](Engine& engine) {
    Integers data(4);
    if (engine.rank() == 0) {
      send(engine, 1, 0, Integers(4));
      meet(*engine.group);
      EXPECT_THAT([&] { send(engine, 1, 0, Integers(1, 1)); },
                  ThrowsMessage<MismatchedCollective>(HasSubstr("but rank 1 received 4 float32")));
      send(engine, 1, 0, Integers(1, 2));
    } else {
      const MemoryView floats{data.view().data, 4, DType::kFloat32};
      EXPECT_THAT([&] { engine.messages->receive(floats, kAny, 0, soon())->wait(soon()); },
                  ThrowsMessage<MismatchedCollective>(
                      AllOf(HasSubstr("rank 0 sent 4 int32"), HasSubstr("receive of 4 float32 from any rank"))));
      meet(*engine.group);
      expect_message(engine, 0, 0, 1, 2);
    }
  });
}

TEST(PointToPointMismatches, AreToldToNobodyElse) {
  run_engines(3, [](Engine& engine) {
    if (engine.rank() == 0) {
      send(engine, 1, 0, Integers(4));
      meet(*engine.group);
      expect_message(engine, 2, 0, 1, 7);
      EXPECT_THROW(send(engine, 1, 0, Integers(4)), MismatchedCollective);
    } else if (engine.rank() == 1) {
      EXPECT_THROW(expect_message(engine, 0, 0, 5, 0), MismatchedCollective);
      meet(*engine.group);
    } else {
      meet(*engine.group);
      send(engine, 0, 0, Integers(1, 7));
    }
    meet(*engine.group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
