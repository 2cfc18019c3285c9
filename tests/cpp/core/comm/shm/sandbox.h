// What a hostile system does to processes. Most of it makes the calling process, a forked child of a test, live in a
// sandbox, without certain system calls or with small file systems of its own: nothing outside the process notices, and
// all of it ends with the process.
#pragma once

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm::testing {

// From now on the given system calls fail with `error`, as they do where a container's filter or an old kernel refuses
// them. Cannot be undone.
inline void refuse_system_calls(const std::vector<int>& numbers, int error) {
  // Programs for other architectures are not expected here, so numbers need no second look.
  std::vector<sock_filter> program = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const int number : numbers) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(number), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    throw SystemFailure("installing a filter of system calls", errno);
  }
}

inline void refuse_memfd_and_pidfd(int error) {
  refuse_system_calls({SYS_memfd_create, SYS_pidfd_open}, error);
}

// Gives the process a table of mounts of its own; false where it may not have one.
inline bool enter_own_mounts() {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

inline void mount_tmpfs(const std::string& folder, std::size_t size_bytes) {
  if (::mount("test", folder.c_str(), "tmpfs", 0, ("size=" + std::to_string(size_bytes)).c_str()) != 0) {
    throw SystemFailure("mounting a tmpfs on " + folder, errno);
  }
}

// Whether a forked child could have a table of mounts of its own.
inline bool may_have_own_mounts() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(enter_own_mounts() ? 0 : 1);
  }
  return wait_process(child) == 0;
}

// Starts a process, which does nothing, under an id that was another's; -1 where this user may not choose ids.
inline pid_t start_impostor(pid_t process) {
  clone_args arguments{};
  arguments.exit_signal = SIGCHLD;
  arguments.set_tid = reinterpret_cast<std::uintptr_t>(&process);
  arguments.set_tid_size = 1;
  const auto child = static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof(arguments)));
  while (child == 0) {
    ::pause();
  }
  return child;
}

// Shared memory that this process has mapped: how many of its mappings have `text` in their name.
inline int count_mappings(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find(text) != std::string::npos ? 1 : 0;
  }
  return count;
}

}  // namespace accelerate_cpp::comm::testing
