#include "core/base/open_files.h"

#include <sys/resource.h>

#include <atomic>
#include <limits>

namespace accelerate_cpp {
namespace {

std::size_t number(rlim_t limit) {
  return limit == RLIM_INFINITY ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(limit);
}

}  // namespace

std::size_t open_files_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? number(limit.rlim_cur) : 1024;
}

bool raise_open_files_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || number(limit.rlim_cur) >= number(limit.rlim_max)) {
    return false;
  }
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

void note_open_file(int descriptor) {
  // The system gives out the lowest free number. The limit is looked up again only once half of it is in use.
  static std::atomic<std::size_t> half{0};
  if (half.load(std::memory_order_relaxed) == 0) {
    half.store(open_files_limit() / 2 + 1, std::memory_order_relaxed);
  }
  if (static_cast<std::size_t>(descriptor) >= half.load(std::memory_order_relaxed)) {
    raise_open_files_limit();
    half.store(open_files_limit() / 2 + 1, std::memory_order_relaxed);
  }
}

std::string describe_open_files_limit() {
  return "this process has reached its limit of " + std::to_string(open_files_limit()) +
         " open files (RLIMIT_NOFILE), or the machine its own; raise it (ulimit -Hn, LimitNOFILE= of systemd, docker "
         "run "
         "--ulimit nofile=...) or keep fewer files open";
}

bool lacks_descriptors(int error) {
  return error == EMFILE || error == ENFILE;
}

}  // namespace accelerate_cpp
