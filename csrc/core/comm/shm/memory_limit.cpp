#include "core/comm/shm/memory_limit.h"

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

// A file that holds one number; nothing for a missing file or the word "max".
std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The part of the current memory that the kernel gives back before it kills: clean pages of files.
std::size_t reclaimable(const std::string& directory) {
  std::ifstream file(directory + "/memory.stat");
  std::string key;
  for (std::size_t bytes = 0; file >> key >> bytes;) {
    if (key == "inactive_file") {
      return bytes;
    }
  }
  return 0;
}

// The directory of this process's control group (the line "0::/path").
std::string own_directory() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) {
      return kCgroupRoot + line.substr(3);
    }
  }
  return kCgroupRoot;
}

}  // namespace

std::optional<std::size_t> memory_left_in(const std::string& directory, const std::string& root) {
  std::optional<std::size_t> least;
  for (std::string place = directory; place.size() >= root.size(); place.erase(place.find_last_of('/'))) {
    const std::optional<std::size_t> limit = read_number(place + "/memory.max");
    const std::optional<std::size_t> used = read_number(place + "/memory.current");
    if (limit && used) {
      const std::size_t held = *used - std::min(*used, reclaimable(place));
      const std::size_t left = *limit - std::min(*limit, held);
      least = least ? std::min(*least, left) : left;
    }
  }
  return least;
}

std::optional<std::size_t> memory_available(const std::string& meminfo) {
  std::ifstream file(meminfo);
  std::string key;
  std::string unit;
  for (std::size_t kibibytes = 0; file >> key >> kibibytes && std::getline(file, unit);) {
    if (key == "MemAvailable:") {
      return kibibytes * 1024;
    }
  }
  return std::nullopt;
}

void check_memory_limit(std::size_t size_bytes) {
  const auto check = [size_bytes](const std::optional<std::size_t>& left, const std::string& whose) {
    if (left && *left < size_bytes) {
      throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of shared memory: " + whose + " has " +
                              std::to_string(*left) + " bytes left; free some, raise the limit or use fewer processes",
                          ENOMEM);
    }
  };
  check(memory_left_in(own_directory(), kCgroupRoot), "the control group");
  check(memory_available("/proc/meminfo"), "the machine");
}

}  // namespace accelerate_cpp::comm
