#include "core/comm/memory_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::HasSubstr;
using testing::soon;
using ::testing::ThrowsMessage;

TEST(MemoryStores, GiveBackWhatWasSet) {
  MemoryStore store;
  store.set("a", "1");
  store.set("b", "2");
  EXPECT_EQ(store.get("a", soon()), "1");
  EXPECT_EQ(store.get("b", soon()), "2");
  EXPECT_EQ(store.get("a", soon()), "1") << "reading does not take the value away";
}

TEST(MemoryStores, CarryArbitraryBytes) {
  MemoryStore store;
  const std::string bytes("\0\xff\n\0", 4);
  store.set("bytes", bytes);
  store.set("nothing", "");
  EXPECT_EQ(store.get("bytes", soon()), bytes);
  EXPECT_EQ(store.get("nothing", soon()), "");
}

TEST(MemoryStores, HandOverAPresentValueEvenAfterTheDeadline) {
  MemoryStore store;
  store.set("key", "value");
  EXPECT_EQ(store.get("key", Deadline::after(std::chrono::milliseconds(0))), "value");
}

TEST(MemoryStores, NameTheKeyThatNobodySetInTime) {
  MemoryStore store;
  store.set("another", "value");
  EXPECT_THAT([&] { store.get("address/3", Deadline::after(std::chrono::milliseconds(1))); },
              ThrowsMessage<Timeout>(HasSubstr("'address/3'")));
}

TEST(MemoryStores, WakeEveryReaderThatWaitsForAKey) {
  MemoryStore store;
  std::atomic<int> waiting{0};
  std::atomic<int> served{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      ++waiting;
      served += store.get("key", soon()) == "value" ? 1 : 0;
    });
  }
  while (waiting < 4) {
    std::this_thread::yield();
  }
  store.set("an unrelated key", "other");
  store.set("key", "value");
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT_EQ(served, 4);
}

TEST(MemoryStores, LoseNothingWhenManyRanksWriteAtOnce) {
  testing::run_threads(4, [](Store& store, int rank) {
    for (int i = 0; i < 100; ++i) {
      store.set(std::to_string(rank) + "/" + std::to_string(i), std::to_string(rank * i));
    }
    for (int other = 0; other < 4; ++other) {
      for (int i = 0; i < 100; ++i) {
        EXPECT_EQ(store.get(std::to_string(other) + "/" + std::to_string(i), soon()), std::to_string(other * i));
      }
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
