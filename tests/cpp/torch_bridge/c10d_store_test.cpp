#include "torch_bridge/c10d_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Deadline in(int milliseconds) {
  return Deadline::after(std::chrono::milliseconds(milliseconds));
}

TEST(C10dStore, KeepsEveryByteOfAValue) {
  const auto shared = c10::make_intrusive<::c10d::HashStore>();
  const std::string value("a\0b\xff\n", 5);
  C10dStore(shared, {}).set("key", value);
  EXPECT_EQ(C10dStore(shared, {}).get("key", in(60000)), value);
}

TEST(C10dStore, KeepsAnEmptyValue) {
  C10dStore store(c10::make_intrusive<::c10d::HashStore>(), {});
  store.set("key", "");
  EXPECT_EQ(store.get("key", in(60000)), "");
}

TEST(C10dStore, WaitsForAValueThatAnotherRankSetsLater) {
  const auto shared = c10::make_intrusive<::c10d::HashStore>();
  std::atomic<bool> waiting{false};
  std::thread other([&] {
    while (!waiting) {
      std::this_thread::yield();
    }
    C10dStore(shared, {}).set("key", "value");
  });
  // The probe is called while get() waits, and not before.
  C10dStore store(shared, [&] { waiting = true; });
  EXPECT_EQ(store.get("key", in(60000)), "value");
  other.join();
  EXPECT_TRUE(waiting);
}

TEST(C10dStore, TimesOutWithTheNameOfTheKey) {
  C10dStore store(c10::make_intrusive<::c10d::HashStore>(), {});
  try {
    store.get("shm/address/1", in(20));
    FAIL() << "the key was never set";
  } catch (const Timeout& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no rank has set 'shm/address/1'"), HasSubstr(" ms")));
  }
}

TEST(C10dStore, StopsWaitingWhenTheProbeThrows) {
  struct Interrupted {};
  C10dStore store(c10::make_intrusive<::c10d::HashStore>(), [] { throw Interrupted(); });
  EXPECT_THROW(store.get("key", in(60000)), Interrupted);
}

}  // namespace
}  // namespace accelerate_cpp::comm
