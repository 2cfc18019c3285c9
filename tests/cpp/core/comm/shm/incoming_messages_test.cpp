#include "core/comm/shm/incoming_messages.h"

#include <gtest/gtest.h>

#include "core/comm/shm/engines.h"
#include "core/comm/shm/outgoing_messages.h"

namespace accelerate_cpp::comm {
namespace {

using testing::Integers;
using testing::meet;
using testing::run_groups;

std::shared_ptr<Group> borrowed(Group& group) {
  return {std::shared_ptr<Group>(), &group};
}

// Posts messages of one integer for rank 1, whose tags are their numbers modulo `tags`, from number `first` on.
void post_many(OutgoingMessages& outgoing, int first, int count, int tags) {
  for (int number = first; number < first + count; ++number) {
    Integers data(1, number);
    const auto place = outgoing.find_place(1, sizeof(std::int32_t), true);
    outgoing.post(*place, data.view(), 1, static_cast<std::uint64_t>(number % tags));
  }
}

TEST(IncomingMessages, AreTakenInTheOrderOfTheirTagOnHoweverManyPagesTheyAre) {
  constexpr int kMany = 5 * kMessages;
  run_groups(2, [](Group& group) {
    OutgoingMessages outgoing(borrowed(group), 0);
    IncomingMessages incoming(borrowed(group));
    if (group.rank() == 0) {
      post_many(outgoing, 0, kMany, 3);
      meet(group);
      meet(group);
      post_many(outgoing, kMany, kMany, 3);  // into the places that have become free, too
    } else {
      meet(group);
      incoming.look();
      for (int number = 0; number < kMany; number += 6) {
        Message* const message = incoming.take(0, static_cast<std::uint64_t>(number % 3));
        ASSERT_NE(message, nullptr);
        incoming.release(*message, 0);
      }
      meet(group);
    }
    meet(group);
    if (group.rank() == 1) {
      incoming.look();
      std::uint64_t last = 0;
      int found = 0;
      for (const Message* message = incoming.take(0, 1); message != nullptr; message = incoming.take(0, 1)) {
        EXPECT_TRUE(found++ == 0 || message->order > last);
        last = message->order;
        EXPECT_EQ(message->order % 3, 1u);
      }
      EXPECT_EQ(found, (2 * kMany + 1) / 3);
    }
    meet(group);
  });
}

TEST(IncomingMessages, AreSeenOnlyOnceTheyWereLookedFor) {
  run_groups(2, [](Group& group) {
    OutgoingMessages outgoing(borrowed(group), 0);
    IncomingMessages incoming(borrowed(group));
    incoming.look();
    meet(group);
    if (group.rank() == 0) {
      post_many(outgoing, 0, 1, 1);
    }
    meet(group);
    if (group.rank() == 1) {
      EXPECT_EQ(incoming.take(0, 0), nullptr);
      incoming.look();
      EXPECT_EQ(incoming.take(0, 7), nullptr);
      EXPECT_NE(incoming.take(0, 0), nullptr);
      EXPECT_EQ(incoming.take(0, 0), nullptr) << "it has been taken";
    }
    meet(group);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
