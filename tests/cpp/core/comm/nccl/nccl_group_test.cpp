#include "core/comm/nccl/nccl_group.h"

#include <memory>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NcclGroupTest : public OnDoubles {
 protected:
  std::unique_ptr<NcclGroup> make(int rank) {
    return std::make_unique<NcclGroup>(context(rank + 2), GroupBoard(store_, "group", rank), options(rank), rank, 2);
  }
  std::shared_ptr<MemoryStore> store_ = std::make_shared<MemoryStore>();
  std::unique_ptr<NcclGroup> group_ = make(0);
};

TEST_F(NcclGroupTest, KnowsItsPlace) {
  EXPECT_EQ(group_->place(), "rank 0 of 2 (cuda:2)");
  EXPECT_NO_THROW(group_->check_usable("barrier"));
  EXPECT_FALSE(group_->failure().has_value());
}

TEST_F(NcclGroupTest, RefusesEverythingOnceItHasFailedAndSaysWhy) {
  group_->fail({false, 4, "the disk is full"});
  EXPECT_THAT(message_of<PeerLost>([&] { group_->check_usable("barrier"); }),
              AllOf(HasSubstr("barrier on rank 0 of 2"), HasSubstr("the disk is full")));
}

TEST_F(NcclGroupTest, TellsTheOthersOfItsFailure) {
  group_->fail({true, 4, "the disk is full"});
  EXPECT_EQ(make(1)->board().failure()->text, "the disk is full");
}

TEST_F(NcclGroupTest, DoesNotRepeatWhatTheOthersSaid) {
  group_->fail({true, 4, "the disk is full"}, false);
  EXPECT_TRUE(group_->failure().has_value());
  EXPECT_FALSE(make(1)->board().failure().has_value());
}

TEST_F(NcclGroupTest, KeepsItsFirstFailure) {
  group_->fail({false, 1, "the disk is full"});
  group_->fail({false, 2, "everything else"});
  EXPECT_EQ(group_->failure()->text, "the disk is full");
  EXPECT_EQ(make(1)->board().failure()->text, "the disk is full");
}

TEST_F(NcclGroupTest, TakesTheCallersStreamFromTheOptions) {
  EXPECT_EQ(group_->caller_stream(), nullptr);
  NcclOptions with_stream = options(0);
  CudaStreamOpaque stream;
  with_stream.caller_stream = [&] { return &stream; };
  EXPECT_EQ(NcclGroup(context(), GroupBoard(store_, "group", 0), with_stream, 0, 1).caller_stream(), &stream);
}

TEST_F(NcclGroupTest, RefusesToWorkInAForkedChild) {
  const pid_t child = start_process({}, 0, [&](Store&, int) {
    EXPECT_THAT(message_of<PeerLost>([&] { group_->check_usable("barrier"); }), HasSubstr("forked"));
    EXPECT_THROW(group_->check_not_forked("barrier"), PeerLost);
  });
  EXPECT_EQ(wait_process(child), 0);
  EXPECT_NO_THROW(group_->check_not_forked("barrier"));
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
