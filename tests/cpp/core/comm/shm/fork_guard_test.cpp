#include "core/comm/shm/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "core/comm/ranks.h"

namespace accelerate_cpp::comm {
namespace {

bool is_open(int descriptor) {
  return ::fcntl(descriptor, F_GETFD) >= 0;
}

class ForkGuard : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::kThreadSanitizer) {
      GTEST_SKIP() << "ThreadSanitizer does not follow forked processes";
    }
    ASSERT_EQ(::pipe(ends_), 0);
  }

  void TearDown() override {
    for (const int end : ends_) {
      if (end >= 0 && is_open(end)) {
        ::close(end);
      }
    }
  }

  // Whether `check` holds in a forked child.
  template <class Check>
  static bool in_child(const Check& check) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(check() ? 0 : 1);
    }
    return testing::wait_process(child) == 0;
  }

  int ends_[2] = {-1, -1};
};

TEST_F(ForkGuard, ClosesGuardedDescriptorsInChildrenAndNoOthers) {
  close_after_fork(ends_[0]);
  EXPECT_TRUE(in_child([&] { return !is_open(ends_[0]) && is_open(ends_[1]); }));
  EXPECT_TRUE(is_open(ends_[0])) << "the parent keeps its own";
  EXPECT_TRUE(in_child([&] { return !is_open(ends_[0]); })) << "and so for every further child";
  close_now(ends_[0]);
}

TEST_F(ForkGuard, LetsTheOtherEndSeeTheParentEndWhileAChildLivesOn) {
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  close_after_fork(ends_[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(hold[1]);
    ::_exit(static_cast<int>(::read(hold[0], &byte, 1)));
  }
  close_now(ends_[1]);
  char byte = 0;
  EXPECT_EQ(::read(ends_[0], &byte, 1), 0) << "the child holds no writing end";
  ::close(hold[0]);
  ::close(hold[1]);
  EXPECT_EQ(testing::wait_process(child), 0);
}

TEST_F(ForkGuard, ClosesNowInTheProcessThatOwnsTheDescriptor) {
  close_after_fork(ends_[0]);
  close_now(ends_[0]);
  EXPECT_FALSE(is_open(ends_[0]));
}

TEST_F(ForkGuard, LeavesAReusedNumberAloneInAChild) {
  close_after_fork(ends_[0]);
  EXPECT_TRUE(in_child([&] {
    const int reused = ::dup2(ends_[1], ends_[0]);
    close_now(ends_[0]);
    return reused == ends_[0] && is_open(reused);
  }));
  close_now(ends_[0]);
}

TEST_F(ForkGuard, ForgetsADescriptorThatItHasClosed) {
  close_after_fork(ends_[0]);
  close_now(ends_[0]);
  const int reused = ::dup2(ends_[1], ends_[0]);
  ASSERT_EQ(reused, ends_[0]);
  EXPECT_TRUE(in_child([&] { return is_open(reused); }));
  close_now(reused);
  EXPECT_TRUE(is_open(reused));
}

TEST_F(ForkGuard, GuardsManyDescriptorsAndThoseOfGrandchildren) {
  std::vector<int> copies;
  for (int i = 0; i < 20; ++i) {
    copies.push_back(::dup(ends_[0]));
    close_after_fork(copies.back());
  }
  const auto all_closed = [&] {
    return std::none_of(copies.begin(), copies.end(), [](int copy) { return is_open(copy); });
  };
  EXPECT_TRUE(in_child([&] {
    close_after_fork(ends_[1]);
    return all_closed() && in_child([&] { return all_closed() && !is_open(ends_[1]); }) && is_open(ends_[1]);
  }));
  for (const int copy : copies) {
    close_now(copy);
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm
