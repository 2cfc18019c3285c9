#include "core/offload/ahead_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "core/base/error.h"

namespace accelerate_cpp::offload {
namespace {

using ::testing::ElementsAre;

// Notes the units of the steps; each waits at a gate.
class Fetched {
 public:
  AheadWorker::Fetch fetch() {
    return [this](const AheadPlan::Step& step) {
      open_.wait(false);
      const std::lock_guard lock(mutex_);
      units_.push_back(step.unit);
    };
  }
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void close() { open_ = false; }
  std::vector<std::size_t> units() {
    const std::lock_guard lock(mutex_);
    return units_;
  }

 private:
  std::atomic<bool> open_ = true;
  std::mutex mutex_;
  std::vector<std::size_t> units_;
};

AheadWorker worker_of(Fetched& fetched, std::vector<std::size_t> sizes, std::size_t window, Granularity granularity) {
  return AheadWorker(AheadPlan(std::move(sizes), window, granularity), 1'000, fetched.fetch(), AtExit::kAwaited);
}

TEST(AheadWorker, FetchesUntilTheWindowIsFull) {
  Fetched fetched;
  AheadWorker worker = worker_of(fetched, {10, 10, 10, 10}, 20, Granularity::kPieces);
  EXPECT_FALSE(worker.arrive(0));
  worker.await_idle();
  EXPECT_THAT(fetched.units(), ElementsAre(0, 1, 2));
  EXPECT_EQ(worker.bytes_ahead(), 20u);
  EXPECT_TRUE(worker.expects(2));
  EXPECT_FALSE(worker.expects(3));
}

TEST(AheadWorker, StartsAgainWhenThereIsRoom) {
  Fetched fetched;
  AheadWorker worker = worker_of(fetched, {10, 10, 10, 10}, 20, Granularity::kPieces);
  for (const std::size_t unit : {0, 1}) {
    worker.arrive(unit);
    worker.await_idle();
  }
  EXPECT_THAT(fetched.units(), ElementsAre(0, 1, 2, 3));
}

TEST(AheadWorker, DoesNotWaitForPieces) {
  Fetched fetched;
  fetched.close();
  AheadWorker worker = worker_of(fetched, {10, 10}, 20, Granularity::kPieces);
  worker.arrive(0);
  worker.arrive(1);
  EXPECT_THAT(fetched.units(), ElementsAre()) << "and both calls have returned";
  fetched.open();
  worker.await_idle();
}

TEST(AheadWorker, WaitsForAWholeUnitThatWasBegun) {
  Fetched fetched;
  fetched.close();
  AheadWorker worker = worker_of(fetched, {10, 10, 10}, 10, Granularity::kWholeUnits);
  worker.arrive(0);
  while (!worker.expects(1)) {  // until the thread has begun it
    std::this_thread::yield();
  }
  std::thread opener([&] { fetched.open(); });
  EXPECT_TRUE(worker.arrive(1));
  EXPECT_THAT(fetched.units(), ::testing::Contains(1));
  opener.join();
  worker.await_idle();
}

TEST(AheadWorker, OutlivesNothingButTheStepItIsIn) {
  Fetched fetched;
  {
    AheadWorker worker = worker_of(fetched, {10, 10, 10}, 30, Granularity::kPieces);
    fetched.close();
    worker.arrive(0);
  }
  fetched.open();
  await_background_threads();
  EXPECT_LE(fetched.units().size(), 1u);
}

TEST(AheadWorker, FetchesNothingInAForkedChild) {
  Fetched fetched;
  AheadWorker worker = worker_of(fetched, {10, 10}, 20, Granularity::kPieces);
  worker.arrive(0);
  worker.await_idle();
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(worker.arrive(1) ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(AheadWorker, RefusesAUnitThatThereIsNot) {
  Fetched fetched;
  AheadWorker worker = worker_of(fetched, {10}, 20, Granularity::kPieces);
  EXPECT_THROW(worker.arrive(1), InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::offload
