#include "core/comm/nccl/nccl_link.h"

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

class NcclLinkTest : public OnDoubles {
 protected:
  // Both ends of a link between devices 0 and 1, as one thread sees them.
  void join() {
    NcclUniqueId id{};
    context().api->get_unique_id(&id);
    for (int rank = 0; rank < 2; ++rank) {
      const NcclContext of_rank = context(rank);
      const DeviceGuard guard(*of_rank.device);
      links_.push_back(std::make_unique<NcclLink>(of_rank, id, rank, 2));
    }
    settle();
  }
  void settle() {
    for (const auto& link : links_) {
      while (!link->settled()) {
      }
    }
  }
  void leave() {
    for (const auto& link : links_) {
      link->retire();
    }
    links_.clear();
  }
  // Sends one byte from link 0 to link 1, as far as issuing goes.
  void issue_send(const CudaMemory& data) {
    links_[0]->issue("ncclSend", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
      return api.send(data.data(), 1, NcclDataType::kUint8, 1, comm, stream);
    });
  }
  void issue_receive(const CudaMemory& data) {
    links_[1]->issue("ncclRecv", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
      return api.receive(data.data(), 1, NcclDataType::kUint8, 0, comm, stream);
    });
  }

  CudaMemory sent_{device(0), MemoryKind::kDevice, 1};
  CudaMemory received_{device(1), MemoryKind::kDevice, 1};
  std::vector<std::unique_ptr<NcclLink>> links_;
};

TEST_F(NcclLinkTest, JoinsWithoutBlockingAndIsPolled) {
  NcclUniqueId id{};
  context().api->get_unique_id(&id);
  auto first = std::make_unique<NcclLink>(context(0), id, 0, 2);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(first->settled()) << "the other rank has not come";
  }
  EXPECT_EQ(gpu_double().count_calls("ncclCommGetAsyncError"), 10u);
  first->abort();
}

TEST_F(NcclLinkTest, BringsDataAcrossStepByStep) {
  join();
  EXPECT_EQ(links_[1]->rank(), 1);
  EXPECT_EQ(links_[1]->size(), 2);
  *sent_.data() = std::byte{42};
  issue_send(sent_);
  issue_receive(received_);
  settle();
  links_[0]->mark();
  links_[1]->mark();
  EXPECT_TRUE(links_[1]->finished());
  EXPECT_TRUE(links_[0]->finished());
  EXPECT_EQ(*received_.data(), std::byte{42});
  leave();
}

TEST_F(NcclLinkTest, IsNotFinishedBeforeTheOtherSideHasCome) {
  join();
  issue_send(sent_);
  settle();
  links_[0]->mark();
  EXPECT_FALSE(links_[0]->finished());
  issue_receive(received_);
  settle();
  EXPECT_TRUE(links_[0]->finished());
  leave();
}

TEST_F(NcclLinkTest, WaitsForAnEventOfAnotherStream) {
  join();
  DeviceStream callers(device(0));
  DeviceEvent ready(device(0));
  const auto held = gpu_double().hold(callers.get());
  ready.record(callers.get());
  links_[0]->wait_for(ready);
  issue_send(sent_);
  issue_receive(received_);
  settle();
  links_[0]->mark();
  EXPECT_FALSE(links_[0]->finished());
  gpu_double().release(held);
  EXPECT_TRUE(links_[0]->finished());
  leave();
}

TEST_F(NcclLinkTest, EndsInOrderWhenAllIsWell) {
  join();
  leave();
  EXPECT_THAT(gpu_double().calls, Contains("ncclCommFinalize 0"));
  EXPECT_THAT(gpu_double().calls, Contains("ncclCommDestroy 1"));
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 0u);
}

TEST_F(NcclLinkTest, EndsByAbortWhileSomethingIsUnderWay) {
  join();
  issue_send(sent_);
  settle();
  links_[1]->abort();
  leave();
  EXPECT_THAT(gpu_double().calls, Not(Contains("ncclCommFinalize 0")));
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 2u);
}

TEST_F(NcclLinkTest, LetsGoOfTheOperandsWhenItIsAborted) {
  join();
  issue_receive(received_);
  settle();
  links_[1]->abort();
  EXPECT_TRUE(links_[1]->stream().idle());
  links_[0]->abort();
  links_[0]->abort();
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 2u) << "once per end";
}

TEST_F(NcclLinkTest, ReportsWhatNcclNoticesByItself) {
  join();
  nccl_double().break_rank(0, NcclResult::kRemoteError);
  EXPECT_THROW(links_[0]->settled(), PeerLost);
  EXPECT_TRUE(links_[1]->settled());
  links_[1]->abort();
  leave();
  EXPECT_EQ(gpu_double().count_calls("ncclCommFinalize"), 0u) << "a broken communicator is not ended in order";
}

TEST_F(NcclLinkTest, ClosesItsGroupAlsoWhenACallFails) {
  join();
  gpu_double().fail("ncclSend", 1, static_cast<int>(NcclResult::kSystemError));
  EXPECT_THAT(message_of<SystemFailure>([&] { issue_send(sent_); }), HasSubstr("ncclSend failed"));
  EXPECT_EQ(nccl_double().open_groups, 0);
  gpu_double().fail("ncclGroupEnd", 1, static_cast<int>(NcclResult::kSystemError));
  leave();
}

TEST_F(NcclLinkTest, AbortsWhatAFailedInitialisationHasLeft) {
  gpu_double().fail("ncclCommInitRankConfig", 1, static_cast<int>(NcclResult::kSystemError));
  NcclUniqueId id{};
  EXPECT_THROW(NcclLink(context(), id, 0, 1), SystemFailure);
}

TEST_F(NcclLinkTest, PassesOnThatTwoRanksHaveOneDevice) {
  NcclUniqueId id{};
  context().api->get_unique_id(&id);
  NcclLink first(context(0), id, 0, 2);
  EXPECT_THAT(message_of<InvalidArgument>([&] { NcclLink(context(0), id, 1, 2); }), HasSubstr("Duplicate GPU"));
  first.abort();
}

TEST_F(NcclLinkTest, SplitsIntoLinksWithPlacesOfTheirOwn) {
  join();
  links_[0]->split(7, 2);
  links_[1]->split(7, 1);
  settle();
  std::vector<std::unique_ptr<NcclLink>> children;
  for (const auto& link : links_) {
    children.push_back(link->child());
    while (!children.back()->settled()) {
    }
  }
  EXPECT_EQ(children[0]->rank(), 1);
  EXPECT_EQ(children[1]->rank(), 0);
  EXPECT_EQ(children[0]->size(), 2);
  EXPECT_EQ(links_[0]->child(), nullptr) << "handed out once";
  children[0]->retire();
  children[1]->retire();
  children.clear();
  leave();
}

TEST_F(NcclLinkTest, GivesNoLinkToARankWithoutAColor) {
  join();
  links_[0]->split(-5, 0);
  links_[1]->split(0, 0);
  settle();
  EXPECT_EQ(links_[0]->child(), nullptr);
  const auto alone = links_[1]->child();
  while (!alone->settled()) {
  }
  EXPECT_EQ(alone->size(), 1);
  leave();
}

TEST_F(NcclLinkTest, AbortsAChildThatNobodyTook) {
  join();
  links_[0]->split(0, 0);
  links_[1]->split(0, 0);
  settle();
  leave();
  EXPECT_EQ(gpu_double().count_calls("ncclCommAbort"), 4u);
}

TEST_F(NcclLinkTest, MakesAndReleasesOperationsForFactors) {
  join();
  float factor = 0.5f;
  const NcclRedOp op = links_[0]->make_premul_sum(NcclDataType::kFloat32, &factor);
  EXPECT_GT(static_cast<int>(op), static_cast<int>(NcclRedOp::kAvg));
  links_[0]->release(op);
  EXPECT_THROW(links_[0]->release(op), InvalidArgument);
  gpu_double().problems.clear();
  leave();
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
