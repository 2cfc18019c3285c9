#include "core/comm/shm/outgoing_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/comm/shm/engines.h"
#include "core/comm/shm/incoming_messages.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::Integers;
using testing::meet;
using testing::run_groups;

constexpr std::size_t kPoolBytes = std::size_t{1} << 20;

std::shared_ptr<Group> borrowed(Group& group) {
  return {std::shared_ptr<Group>(), &group};
}

// Posts one integer for rank 1; false when there is no place.
bool post_one(OutgoingMessages& outgoing, std::uint64_t tag, bool beyond_limits = false) {
  Integers data(1, static_cast<std::int32_t>(tag));
  const auto place = outgoing.find_place(1, sizeof(std::int32_t), beyond_limits);
  if (place) {
    outgoing.post(*place, data.view(), 1, tag);
  }
  return place.has_value();
}

TEST(OutgoingMessages, FindAsManyPlacesAsTheyPromiseAndMoreWhenTheyMust) {
  run_groups(2, [](Group& group) {
    if (group.rank() == 0) {
      OutgoingMessages outgoing(borrowed(group), kPoolBytes);
      for (std::uint64_t i = 0; i < OutgoingMessages::kEagerMessages; ++i) {
        ASSERT_TRUE(post_one(outgoing, i));
      }
      EXPECT_FALSE(post_one(outgoing, 0));
      EXPECT_TRUE(post_one(outgoing, 0, true));
    }
    meet(group);
  });
}

TEST(OutgoingMessages, KnowWhatTheirReceiverWishesForOnceForEachWish) {
  run_groups(2, [](Group& group) {
    const auto own = borrowed(group);
    OutgoingMessages outgoing(own, kPoolBytes);
    IncomingMessages incoming(own);
    if (group.rank() == 0) {
      EXPECT_FALSE(outgoing.take_wish(1, 7)) << "nothing was ever posted";
      post_one(outgoing, 1);
      outgoing.set_held_back(1, true);
      meet(group);
      meet(group);
      EXPECT_FALSE(outgoing.take_wish(1, 8));
      EXPECT_TRUE(outgoing.take_wish(1, 7));
      EXPECT_FALSE(outgoing.take_wish(1, 7)) << "it has been granted";
      outgoing.set_held_back(1, false);
      meet(group);
    } else {
      meet(group);
      incoming.look();
      EXPECT_TRUE(incoming.held_back(0));
      incoming.wish(0, tag_bit(7));
      meet(group);
      meet(group);
      EXPECT_FALSE(incoming.held_back(0));
    }
    meet(group);
  });
}

TEST(OutgoingMessages, DescribeWhatWasRefusedAndUseItsPlaceAgain) {
  run_groups(2, [](Group& group) {
    const auto own = borrowed(group);
    OutgoingMessages outgoing(own, kPoolBytes);
    IncomingMessages incoming(own);
    if (group.rank() == 0) {
      EXPECT_FALSE(outgoing.take_refusals(1));
      post_one(outgoing, 5);
      meet(group);
      meet(group);
      const auto refused = outgoing.take_refusals(1);
      ASSERT_TRUE(refused);
      EXPECT_THAT(*refused, HasSubstr("rank 0 sent 1 int32 with tag 5, but rank 1 received 9 float64"));
      EXPECT_FALSE(outgoing.take_refusals(1));
      for (std::uint64_t i = 0; i < OutgoingMessages::kEagerMessages; ++i) {
        ASSERT_TRUE(post_one(outgoing, i));
      }
    } else {
      meet(group);
      incoming.look();
      Message* const message = incoming.take(0, 5);
      ASSERT_NE(message, nullptr);
      incoming.refuse(*message, 0, 9, DType::kFloat64);
      meet(group);
    }
    meet(group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
