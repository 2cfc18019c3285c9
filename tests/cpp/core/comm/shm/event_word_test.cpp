#include "core/comm/shm/event_word.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

// So long that a wake-up that got lost shows as a test that does not end.
constexpr auto kForever = std::chrono::hours(10);

// Sleeps until `condition` holds, relying on wake-ups alone.
template <class Condition>
void sleep_until(EventWord& word, const Condition& condition) {
  while (true) {
    const std::uint32_t seen = word.value.load();
    if (condition()) {
      return;
    }
    word.sleep(seen, kForever);
  }
}

// Two parties take turns in counting to `rounds`.
struct PingPong {
  EventWord ping{};
  EventWord pong{};
  std::atomic<int> pings{0};
  std::atomic<int> pongs{0};

  void serve(int rounds) {
    for (int i = 1; i <= rounds; ++i) {
      pings.store(i);
      ping.notify();
      sleep_until(pong, [&] { return pongs.load() >= i; });
    }
  }

  void reply(int rounds) {
    for (int i = 1; i <= rounds; ++i) {
      sleep_until(ping, [&] { return pings.load() >= i; });
      pongs.store(i);
      pong.notify();
    }
  }
};

TEST(EventWords, LoseNoWakeUpBetweenThreads) {
  constexpr int kRounds = 20000;
  PingPong game;
  std::thread other([&] { game.reply(kRounds); });
  game.serve(kRounds);
  other.join();
  EXPECT_EQ(game.pongs.load(), kRounds);
  EXPECT_EQ(game.ping.sleepers.load(), 0u);
  EXPECT_EQ(game.pong.sleepers.load(), 0u);
}

TEST(EventWords, LoseNoWakeUpBetweenProcesses) {
  if (testing::kThreadSanitizer) {
    GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
  }
  constexpr int kRounds = 20000;
  void* const memory = ::mmap(nullptr, sizeof(PingPong), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const game = new (memory) PingPong;
  const pid_t child = ::fork();
  if (child == 0) {
    game->reply(kRounds);
    ::_exit(0);
  }
  game->serve(kRounds);
  EXPECT_EQ(testing::wait_process(child), 0);
  EXPECT_EQ(game->pongs.load(), kRounds);
  ::munmap(memory, sizeof(PingPong));
}

TEST(EventWords, WakeEverySleeper) {
  EventWord word{};
  std::atomic<bool> go{false};
  std::atomic<int> woken{0};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      sleep_until(word, [&] { return go.load(); });
      ++woken;
    });
  }
  while (word.sleepers.load() < 4) {
    std::this_thread::yield();
  }
  go = true;
  word.notify();
  for (std::thread& sleeper : sleepers) {
    sleeper.join();
  }
  EXPECT_EQ(woken, 4);
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(EventWords, DoNotSleepWhenTheyHaveChangedSinceTheyWereRead) {
  EventWord word{};
  const std::uint32_t seen = word.value.load();
  word.notify();
  word.sleep(seen, kForever);
  EXPECT_NE(word.value.load(), seen);
}

TEST(EventWords, ReturnWithoutANotificationOnceTheLimitHasPassed) {
  EventWord word{};
  word.sleep(word.value.load(), std::chrono::milliseconds(1));
  EXPECT_EQ(word.value.load(), 0u);
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(EventWords, DoNotWaitForAConditionThatHolds) {
  EventWord word{};
  int ticks = 0;
  word.wait_until([] { return true; }, {}, [&] { ++ticks; });
  EXPECT_EQ(ticks, 0);
}

TEST(EventWords, LookAtTheConditionAsOftenAsTheirLimitsSayBeforeTheySleep) {
  EventWord word{};
  int looks = 0;
  int ticks = 0;
  word.wait_until([&] { return ++looks == 1000; }, {400, 600}, [&] { ++ticks; });
  EXPECT_EQ(looks, 1000);
  EXPECT_EQ(ticks, 0);
}

TEST(EventWords, TickWhileNothingHappens) {
  EventWord word{};
  int ticks = 0;
  word.wait_until([&] { return ticks == 2; }, {}, [&] { ++ticks; });
  EXPECT_EQ(ticks, 2);
}

TEST(EventWords, StopWaitingWhenTheTickThrows) {
  EventWord word{};
  EXPECT_THROW(word.wait_until([] { return false; }, {}, [] { throw std::runtime_error("enough"); }),
               std::runtime_error);
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(EventWords, ShowAWaiterWhatWasWrittenBeforeTheNotification) {
  for (int round = 0; round < 200; ++round) {
    EventWord word{};
    std::atomic<bool> ready{false};
    int written = 0;
    std::thread writer([&] {
      written = 7;
      ready.store(true, std::memory_order_release);
      word.notify();
    });
    word.wait_until([&] { return ready.load(std::memory_order_acquire); },
                    round % 2 == 0 ? SpinLimits{100, 100} : SpinLimits{}, [] {});
    EXPECT_EQ(written, 7);
    writer.join();
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm
