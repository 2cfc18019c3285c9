// Reads the weights of a model from files that are mapped, before the computation comes to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/offload/ahead_worker.h"

namespace accelerate_cpp::offload {

// Memory of this process that a file is mapped to. It is only passed to madvise(): if nothing is mapped there any more,
// nothing happens.
struct MappedRange {
  std::uintptr_t address;
  std::size_t bytes;
};

class ReadAhead {
 public:
  // `units` has the ranges that each unit needs. At most `window_bytes` of the units after the present one are read
  // early; the system may keep more in its page cache, as it always does.
  ReadAhead(std::vector<std::vector<MappedRange>> units, std::size_t window_bytes);

  // The computation reads `unit` from now on. Does not wait. Throws InvalidArgument when there is no such unit.
  void arrive(std::size_t unit) { worker_.arrive(unit); }

  void await_idle() const { worker_.await_idle(); }
  // Of the units after the present one, what has been read or is being read.
  std::size_t bytes_ahead() const { return worker_.bytes_ahead(); }

 private:
  AheadWorker worker_;
};

}  // namespace accelerate_cpp::offload
