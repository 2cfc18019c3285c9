// Runs the ranks of a group inside a test: as threads that share a MemoryStore, or as forked processes that share a
// folder.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/memory_store.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm::testing {

inline Deadline soon() {
  return Deadline::after(std::chrono::seconds(120));
}

// GCC's thread sanitizer does not support processes that fork while threads run.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// GCC's address sanitizer (version 12) does not hold its own locks across a fork: where another thread allocates at
// that moment, the child can wait for one of them for ever.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

// What an exception of the given type says that `action` throws.
template <class Exception, class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing of the expected type was thrown";
}

using RankBody = std::function<void(Store& store, int rank)>;

// Runs `body` once per rank in its own thread; an exception in any of them fails the test.
inline void run_threads(int size, const RankBody& body) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&store, &body, rank] {
      try {
        body(store, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// A store in a folder: one file per key, put in place by renaming.
class FolderStore final : public Store {
 public:
  explicit FolderStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::filesystem::path temporary = path_of(key).string() + ".part";
    std::ofstream(temporary, std::ios::binary) << value;
    std::filesystem::rename(temporary, path_of(key));
  }

  std::string get(const std::string& key, Deadline deadline) override {
    while (!std::filesystem::exists(path_of(key))) {
      if (deadline.expired()) {
        throw Timeout("no rank has set " + key);
      }
      std::this_thread::yield();
    }
    std::ifstream file(path_of(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ / key;
  }

  std::filesystem::path folder_;
};

inline std::filesystem::path make_temporary_folder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "accelerate_cpp_test_XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error("mkdtemp failed");
  }
  return pattern;
}

// Starts `body` in a forked process; returns its process id. The child exits with 0 unless the body throws or fails.
inline pid_t start_process(const std::filesystem::path& folder, int rank, const RankBody& body) {
  const pid_t child = ::fork();
  if (child != 0) {
    return child;
  }
  int status = 0;
  try {
    FolderStore store(folder);
    body(store, rank);
    status = ::testing::Test::HasFailure() ? 3 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d threw: %s\n", rank, error.what());
    status = 4;
  }
  std::fflush(stderr);
  ::_exit(status);
}

// Waits for a child and returns its exit code, or minus the signal that ended it.
inline int wait_process(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

inline void run_processes(int size, const RankBody& body) {
  const std::filesystem::path folder = make_temporary_folder();
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(start_process(folder, rank, body));
  }
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(wait_process(children[static_cast<std::size_t>(rank)]), 0) << "rank " << rank;
  }
  std::filesystem::remove_all(folder);
}

}  // namespace accelerate_cpp::comm::testing
