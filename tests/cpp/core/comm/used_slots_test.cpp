#include "core/comm/used_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::ElementsAre;

TEST(UsedSlots, KeepWhatIsWrittenAndKnowWhatAnyRankWrote) {
  UsedSlots used({{DType::kFloat32, 8, {{0, 4}, {4, 4}}}, {DType::kFloat32, 0, {}}, {DType::kFloat32, 4, {{0, 4}}}});
  used.own(0)[1] = 1;
  std::vector<std::uint8_t> seen;
  used.reduce([&](MemoryView flags) {
    auto* const bytes = static_cast<std::uint8_t*>(flags.data);
    seen.assign(bytes, bytes + flags.count);
    bytes[2] = 1;  // another rank's
  });
  EXPECT_THAT(seen, ElementsAre(0, 1, 0));
  EXPECT_FALSE(used.anywhere(0, 0));
  EXPECT_TRUE(used.anywhere(0, 1));
  EXPECT_TRUE(used.anywhere(2, 0));
  EXPECT_EQ(used.own(2)[0], 0) << "what this rank wrote stays";
}

TEST(UsedSlots, TakeItForAFaultToNameABucketOrSlotThatIsNotThere) {
  UsedSlots used({{DType::kFloat32, 8, {{0, 4}}}});
  EXPECT_THROW(used.own(1), InternalError);
  EXPECT_THROW(used.anywhere(0, 1), InternalError);
  EXPECT_THROW(used.anywhere(1, 0), InternalError);
}

TEST(UsedSlots, ThatAreNoneAreNotReduced) {
  UsedSlots({}).reduce([](MemoryView) { FAIL(); });
}

}  // namespace
}  // namespace accelerate_cpp::comm
