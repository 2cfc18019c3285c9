#include "core/comm/pending.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

class Manual final : public Pending {
 public:
  void wait(const std::optional<Deadline>&) override { rethrow_error(); }
  void finish(std::exception_ptr error = nullptr) {
    for (const Callback& callback : mark_ended(std::move(error))) {
      callback();
    }
  }
};

TEST(Pending, IsUnderWayUntilItEnds) {
  Manual pending;
  EXPECT_FALSE(pending.ended());
  EXPECT_FALSE(pending.poll());
  pending.finish();
  EXPECT_TRUE(pending.ended());
  EXPECT_TRUE(pending.poll());
  EXPECT_EQ(pending.error(), nullptr);
  pending.wait(std::nullopt);
}

TEST(Pending, KeepsWhyItFailed) {
  Manual pending;
  EXPECT_EQ(pending.error(), nullptr);
  pending.finish(std::make_exception_ptr(std::range_error("too far")));
  EXPECT_NE(pending.error(), nullptr);
  EXPECT_THROW(pending.wait(std::nullopt), std::range_error);
  EXPECT_THROW(pending.wait(std::nullopt), std::range_error) << "every waiter learns it";
}

TEST(Pending, CallsBackOnceInTheOrderOfAsking) {
  Manual pending;
  std::vector<int> calls;
  pending.then([&] { calls.push_back(1); });
  pending.then([&] { calls.push_back(2); });
  EXPECT_TRUE(calls.empty());
  pending.finish();
  EXPECT_EQ(calls, (std::vector<int>{1, 2}));
  pending.then([&] { calls.push_back(3); });
  EXPECT_EQ(calls, (std::vector<int>{1, 2, 3})) << "what has ended calls back at once";
}

TEST(Pending, HasEndedWhenItCallsBack) {
  Manual pending;
  bool ended = false;
  pending.then([&] { ended = pending.ended(); });
  pending.finish();
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace accelerate_cpp::comm
