// How many files this process may have open, sockets and shared memory included.
#pragma once

#include <cerrno>
#include <cstddef>
#include <string>

namespace accelerate_cpp {

// The limit (RLIMIT_NOFILE, soft) that holds now.
std::size_t open_files_limit();

// Raises the limit to the hard limit of this process. Returns whether that was higher.
bool raise_open_files_limit();

// Raises the limit once the number of a new descriptor shows that half of it is in use.
void note_open_file(int descriptor);

// Opens a file with `open`, which returns a descriptor or -1 with errno set. If there are too few descriptors, raises
// the limit and tries again.
template <class Open>
int open_within_limit(const Open& open);

// "this process has reached its limit of 1024 open files …", for messages.
std::string describe_open_files_limit();

// Whether `error`, an errno value, means that the process has no descriptors left.
bool lacks_descriptors(int error);

template <class Open>
int open_within_limit(const Open& open) {
  int descriptor = open();
  if (descriptor < 0 && lacks_descriptors(errno) && raise_open_files_limit()) {
    descriptor = open();
  }
  if (descriptor >= 0) {
    note_open_file(descriptor);
  }
  return descriptor;
}

}  // namespace accelerate_cpp
