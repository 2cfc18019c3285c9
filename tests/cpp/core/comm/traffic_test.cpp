#include "core/comm/traffic.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

TEST(Traffic, CountsOperationsAndBytesByKind) {
  Traffic traffic;
  EXPECT_TRUE(traffic.totals().empty());
  traffic.add(CallKind::kAllReduce, 8);
  traffic.add(CallKind::kAllReduce, 4);
  traffic.add(CallKind::kBarrier, 0);
  const std::map<std::string, Traffic::Total> expected = {{"all_reduce", {2, 12}}, {"barrier", {1, 0}}};
  EXPECT_EQ(traffic.totals(), expected);
}

TEST(Traffic, LosesNothingThatSeveralThreadsAdd) {
  Traffic traffic;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) {
        traffic.add(CallKind::kSend, 3);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const Traffic::Total expected{4000, 12000};
  EXPECT_EQ(traffic.totals().at("send"), expected);
}

TEST(Traffic, GivesEachKindANameOfItsOwn) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(CallKind::kReceive); ++kind) {
    names.insert(name(static_cast<CallKind>(kind)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(CallKind::kReceive) + 1);
  EXPECT_EQ(names.count(""), 0U);
}

}  // namespace
}  // namespace accelerate_cpp::comm
