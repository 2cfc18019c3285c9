#include "core/base/open_files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "core/comm/ranks.h"

namespace accelerate_cpp {
namespace {

using ::testing::HasSubstr;

// Runs `body` in a forked process whose limits of open files are these; it returns the exit code.
template <class Body>
void run_with_limits(rlim_t soft, rlim_t hard, const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{soft, hard};
    const bool limited = ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
    if (limited) {
      body();
    }
    ::_exit(limited && !::testing::Test::HasFailure() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

int open_null() {
  return ::open("/dev/null", O_RDONLY);
}

TEST(OpenFiles, AreLimitedByWhatTheSystemAllowsOnceTheyNeedIt) {
  run_with_limits(64, 128, [] {
    EXPECT_EQ(open_files_limit(), 64u);
    for (int i = 0; i < 90; ++i) {
      ASSERT_GE(open_within_limit(open_null), 0) << i;
    }
    EXPECT_EQ(open_files_limit(), 128u);
    EXPECT_FALSE(raise_open_files_limit()) << "there is no more";
  });
}

TEST(OpenFiles, AreNotOpenedBeyondTheHardLimitWhichIsNamed) {
  run_with_limits(64, 64, [] {
    std::vector<int> opened;
    for (int descriptor = open_null(); descriptor >= 0; descriptor = open_within_limit(open_null)) {
      opened.push_back(descriptor);
    }
    const int error = errno;
    for (const int descriptor : opened) {
      ::close(descriptor);  // sanitizers look into memory through descriptors of their own
    }
    EXPECT_GT(opened.size(), 40u);
    EXPECT_TRUE(lacks_descriptors(error));
    EXPECT_THAT(describe_open_files_limit(), HasSubstr("64 open files (RLIMIT_NOFILE)"));
  });
}

TEST(OpenFiles, LeaveTheLimitAloneWhileTheyAreFew) {
  run_with_limits(200, 400, [] {
    ASSERT_GE(open_within_limit(open_null), 0);
    EXPECT_EQ(open_files_limit(), 200u);
  });
}

}  // namespace
}  // namespace accelerate_cpp
