#include "core/comm/shm/liveness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/comm/ranks.h"
#include "core/comm/shm/sandbox.h"

namespace accelerate_cpp::comm {
namespace {

int refuse(pid_t) {
  errno = EPERM;
  return -1;
}

// A child that lives until it is killed.
class Child {
 public:
  Child() : process_(::fork()) {
    while (process_ == 0) {
      ::pause();
    }
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t process() const { return process_; }

  // Ends the child; with `reap` its process id is free again afterwards.
  void end(bool reap = true) {
    if (process_ < 0) {
      return;
    }
    ::kill(process_, SIGKILL);
    if (reap) {
      testing::wait_process(std::exchange(process_, -1));
    } else {
      siginfo_t ended{};
      ::waitid(P_PID, static_cast<id_t>(process_), &ended, WEXITED | WNOWAIT);
    }
  }

 private:
  pid_t process_;
};

class Liveness : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kThreadSanitizer) {
      GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
    }
    const int descriptor = ProcessWatch::open_pidfd(::getpid());
    if (descriptor < 0) {
      GTEST_SKIP() << "this kernel or sandbox has no pidfd_open";
    }
    ::close(descriptor);
  }
};

TEST_F(Liveness, SeesAChildsEnd) {
  Child child;
  const ProcessWatch watch(child.process());
  EXPECT_FALSE(watch.ended());
  child.end();
  EXPECT_TRUE(watch.ended());
  EXPECT_TRUE(watch.ended()) << "and goes on seeing it";
}

TEST_F(Liveness, SeesTheEndOfAProcessThatNobodyHasWaitedForYet) {
  Child child;
  const ProcessWatch watch(child.process());
  child.end(/*reap=*/false);
  EXPECT_TRUE(watch.ended());
}

TEST_F(Liveness, KeepsWatchingWhenItIsMoved) {
  Child child;
  ProcessWatch first(child.process());
  const ProcessWatch second(std::move(first));
  EXPECT_FALSE(second.ended());
  child.end();
  EXPECT_TRUE(second.ended());
  EXPECT_FALSE(first.ended()) << "a moved-from watch knows nothing";
}

TEST_F(Liveness, TellsProcessesApart) {
  Child one;
  Child other;
  const ProcessWatch watch_one(one.process());
  const ProcessWatch watch_other(other.process());
  one.end();
  EXPECT_TRUE(watch_one.ended());
  EXPECT_FALSE(watch_other.ended());
}

TEST_F(Liveness, IsNotDeceivedByAnotherProcessUnderTheSameId) {
  Child child;
  const pid_t process = child.process();
  const ProcessWatch watch(process);
  child.end();
  const pid_t impostor = testing::start_impostor(process);
  if (impostor < 0) {
    GTEST_SKIP() << "this user may not choose process ids";
  }
  ASSERT_EQ(impostor, process);
  EXPECT_EQ(::kill(process, 0), 0) << "there is a process of that id";
  EXPECT_TRUE(watch.ended());
  ::kill(impostor, SIGKILL);
  testing::wait_process(impostor);
}

TEST_F(Liveness, KnowsNothingWhereTheKernelRefuses) {
  Child child;
  const ProcessWatch watch(child.process(), refuse);
  EXPECT_FALSE(watch.ended());
  child.end();
  EXPECT_FALSE(watch.ended());
}

TEST(LivenessOfOneself, IsNeverInDoubt) {
  static bool opened = false;
  opened = false;
  const ProcessWatch watch(::getpid(), [](pid_t) {
    opened = true;
    return -1;
  });
  EXPECT_FALSE(watch.ended());
  EXPECT_FALSE(opened) << "no descriptor is spent on it";
}

TEST(LivenessOfNobody, IsNotAsked) {
  static bool opened = false;
  opened = false;
  for (const pid_t process : {0, -1}) {
    const ProcessWatch watch(process, [](pid_t) {
      opened = true;
      return -1;
    });
    EXPECT_FALSE(watch.ended());
  }
  EXPECT_FALSE(opened);
}

TEST(LivenessWatch, GivesItsDescriptorBack) {
  static int opened = -1;
  {
    ProcessWatch watch(::getppid(), [](pid_t) { return opened = ::dup(0); });
    ASSERT_GE(opened, 0);
    const ProcessWatch moved(std::move(watch));
    EXPECT_GE(::fcntl(opened, F_GETFD), 0);
  }
  EXPECT_LT(::fcntl(opened, F_GETFD), 0);
}

}  // namespace
}  // namespace accelerate_cpp::comm
