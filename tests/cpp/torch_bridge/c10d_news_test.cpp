#include "torch_bridge/c10d_news.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

C10dNews::StorePointer make_store() {
  return c10::make_intrusive<::c10d::HashStore>();
}

TEST(C10dNews, TellsTheFirstFailureToAllGroupsOnTheStore) {
  const auto store = make_store();
  C10dNews leaders(store, "leaders");
  C10dNews everyone(store, "everyone");
  leaders.tell_failure("rank 2", "out of memory");
  everyone.tell_failure("rank 3", "out of disk");
  C10dNews other(store, "everyone");
  EXPECT_FALSE(other.failure().reason().has_value());
  other.ask();
  EXPECT_EQ(other.failure().reason(), "rank 2 failed: out of memory");
  EXPECT_EQ(everyone.failure().reason(), "out of disk");
}

TEST(C10dNews, TellsTheFirstDepartureToItsGroup) {
  const auto store = make_store();
  C10dNews(store, "everyone").tell_departure(1, {7, "rank 1", {3, 0, 12}});
  C10dNews(store, "everyone").tell_departure(0, {8, "rank 0"});
  C10dNews news(store, "everyone");
  news.ask();
  ASSERT_TRUE(news.departure().has_value());
  EXPECT_EQ(news.departure()->num_operations, 7u);
  EXPECT_EQ(news.departure()->who, "rank 1");
  EXPECT_EQ(news.messages_of_departed(0, 2), 0u);
  EXPECT_EQ(news.messages_of_departed(1, 0), 3u);
  EXPECT_EQ(news.messages_of_departed(1, 2), 12u);
  EXPECT_FALSE(news.messages_of_departed(2, 0).has_value());
  C10dNews leaders(store, "leaders");
  leaders.ask();
  EXPECT_FALSE(leaders.departure().has_value());
  EXPECT_FALSE(leaders.messages_of_departed(1, 0).has_value());
}

// A store that counts how often it is asked, and whose host is gone.
class LostStore final : public ::c10d::HashStore {
 public:
  bool check(const std::vector<std::string>&) override {
    ++num_checks;
    throw std::runtime_error("Connection refused");
  }
  int num_checks = 0;
};

TEST(C10dNews, DoesNotMindThatTheStoreIsGone) {
  const auto store = c10::make_intrusive<LostStore>();
  C10dNews news(store, "everyone");
  news.ask();
  EXPECT_FALSE(news.failure().reason().has_value());
  EXPECT_FALSE(news.messages_of_departed(1, 0).has_value());
  news.tell_failure("rank 0", "why");
  EXPECT_EQ(news.failure().reason(), "why");
}

TEST(C10dNews, AsksOnlyNowAndThen) {
  const auto store = c10::make_intrusive<LostStore>();
  C10dNews news(store, "everyone");
  news.ask_now_and_then();
  const int once = store->num_checks;
  EXPECT_GT(once, 0);
  for (int i = 0; i < 1000; ++i) {
    news.ask_now_and_then();
  }
  EXPECT_LT(store->num_checks, 1000 * once);
}

// A store that answers nobody, until the test is over: its host is stopped, or the network is cut.
class SilentStore final : public ::c10d::HashStore {
 public:
  explicit SilentStore(std::shared_future<void> over) : over_(std::move(over)) {}
  bool check(const std::vector<std::string>&) override {
    over_.wait();
    return false;
  }

 private:
  const std::shared_future<void> over_;
};

TEST(C10dNews, GoesOnWhereTheStoreNeverAnswers) {
  std::promise<void> over;
  {
    C10dNews news(c10::make_intrusive<SilentStore>(over.get_future().share()), "everyone");
    news.ask_now_and_then();
    news.ask();
    EXPECT_FALSE(news.failure().reason().has_value());
    EXPECT_FALSE(news.messages_of_departed(1, 0).has_value());
    news.tell_departure(1, {7, "rank 1"});
    news.tell_failure("rank 1", "why");
    EXPECT_EQ(news.failure().reason(), "why");
  }
  over.set_value();
}

}  // namespace
}  // namespace accelerate_cpp::comm
