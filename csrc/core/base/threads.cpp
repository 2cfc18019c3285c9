#include "core/base/threads.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>
#include <vector>

namespace accelerate_cpp {

#if defined(__linux__)

namespace {

using Clock = std::chrono::steady_clock;

// A thread that is woken, or waits for a lock that another one is about to release, is seen asleep for a moment.
constexpr int kLooks = 3;
constexpr std::chrono::milliseconds kBetweenLooks{1};

std::string first_line_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool sleeps(const std::filesystem::path& thread) {
  const std::string line = first_line_of(thread / "stat");  // "17 (name) S 1 …", and empty once it has ended
  const std::size_t name_end = line.rfind(") ");
  return name_end == std::string::npos || line.compare(name_end + 2, 1, "S") == 0;
}

std::vector<std::filesystem::path> threads_named(const std::string& name) {
  std::vector<std::filesystem::path> found;
  std::error_code unreadable;
  std::filesystem::directory_iterator thread("/proc/self/task", unreadable);
  for (; !unreadable && thread != std::filesystem::directory_iterator(); thread.increment(unreadable)) {
    if (first_line_of(thread->path() / "comm") == name) {
      found.push_back(thread->path());
    }
  }
  return found;
}

}  // namespace

bool thread_sleeps(pid_t thread) {
  return sleeps("/proc/self/task/" + std::to_string(thread));
}

bool await_sleep_of_threads(const std::string& name, std::chrono::milliseconds patience) {
  const std::vector<std::filesystem::path> threads = threads_named(name);
  const Clock::time_point end = Clock::now() + patience;
  for (int looks = 0; !threads.empty() && looks < kLooks;) {
    if (std::all_of(threads.begin(), threads.end(), sleeps)) {
      ++looks;
    } else if (Clock::now() < end) {
      looks = 0;
    } else {
      return false;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return true;
}

#else

bool thread_sleeps(pid_t) {
  return true;
}

bool await_sleep_of_threads(const std::string&, std::chrono::milliseconds) {
  return true;
}

#endif

}  // namespace accelerate_cpp
