#include "core/offload/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace accelerate_cpp::offload {
namespace {

// Long enough for the system to read in large pieces, short enough to follow a computation that goes elsewhere.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

// Reads the pages of a range and maps them, so that the computation finds no page missing. Where the system cannot do
// that (before Linux 5.14) it is asked to read them in its own time.
void read_pages(std::uintptr_t begin, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = begin / page * page;
  auto* const address = reinterpret_cast<void*>(first);  // NOLINT(performance-no-int-to-ptr)
  const std::size_t length = begin + bytes - first;
#ifdef MADV_POPULATE_READ
  if (::madvise(address, length, MADV_POPULATE_READ) == 0) {
    return;
  }
#endif
  ::madvise(address, length, MADV_WILLNEED);  // only a hint, so failure does not matter
}

// Reads a part of a unit, as if its ranges were one contiguous sequence of bytes.
void read_part(const std::vector<MappedRange>& ranges, std::size_t begin, std::size_t bytes) {
  for (const MappedRange& range : ranges) {
    if (bytes == 0) {
      return;
    }
    const std::size_t skipped = std::min(begin, range.bytes);
    const std::size_t taken = std::min(bytes, range.bytes - skipped);
    if (taken > 0) {
      read_pages(range.address + skipped, taken);
    }
    begin -= skipped;
    bytes -= taken;
  }
}

std::vector<std::size_t> sizes_of(const std::vector<std::vector<MappedRange>>& units) {
  std::vector<std::size_t> sizes;
  for (const std::vector<MappedRange>& ranges : units) {
    std::size_t bytes = 0;
    for (const MappedRange& range : ranges) {
      bytes += range.bytes;
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

AheadWorker reader_of(std::vector<std::vector<MappedRange>> units, std::size_t window_bytes) {
  AheadPlan plan(sizes_of(units), window_bytes, Granularity::kPieces);
  return AheadWorker(
      std::move(plan), kPieceBytes,
      [units = std::move(units)](const AheadPlan::Step& step) { read_part(units[step.unit], step.begin, step.bytes); },
      AtExit::kLeft);
}

}  // namespace

ReadAhead::ReadAhead(std::vector<std::vector<MappedRange>> units, std::size_t window_bytes)
    : worker_(reader_of(std::move(units), window_bytes)) {}

}  // namespace accelerate_cpp::offload
