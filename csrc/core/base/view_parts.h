// Arithmetic on views that several communicators share: parts of views, and views of all ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/base/memory_view.h"

namespace accelerate_cpp {

// The part of a view that lies within elements [begin, begin + count).
template <class View>
View within(const View& view, std::size_t begin, std::size_t count) {
  const std::size_t first = std::min(begin, view.count);
  const std::size_t skipped_bytes = first * element_size(view.dtype);
  return {view.data == nullptr ? nullptr : view.bytes() + skipped_bytes, std::min(count, view.count - first),
          view.dtype};
}

template <class View>
std::vector<View> within(const std::vector<View>& views, std::size_t begin, std::size_t count) {
  std::vector<View> parts;
  for (const View& view : views) {
    parts.push_back(within(view, begin, count));
  }
  return parts;
}

// The elements of the longest view.
template <class View>
std::size_t longest(const std::vector<View>& views) {
  std::size_t count = 0;
  for (const View& view : views) {
    count = std::max(count, view.count);
  }
  return count;
}

// The elements of each view.
template <class View>
std::vector<std::uint64_t> counts_of(const std::vector<View>& views) {
  std::vector<std::uint64_t> counts;
  for (const View& view : views) {
    counts.push_back(view.count);
  }
  return counts;
}

// The same for `size` ranks: 0 for those that have no view.
template <class View>
std::vector<std::uint64_t> counts_of(const std::vector<View>& views, int size) {
  std::vector<std::uint64_t> counts = counts_of(views);
  counts.resize(static_cast<std::size_t>(size));
  return counts;
}

// `count` for `rank`, 0 for the others.
inline std::vector<std::uint64_t> one_count(int rank, std::size_t count, int size) {
  std::vector<std::uint64_t> counts(static_cast<std::size_t>(size));
  counts[static_cast<std::size_t>(rank)] = count;
  return counts;
}

inline std::vector<ConstMemoryView> const_views(const std::vector<MemoryView>& views) {
  return {views.begin(), views.end()};
}

// Copies the data into the view, unless they are already there.
inline void copy_to(const void* from, MemoryView to) {
  if (to.count > 0 && from != to.data) {
    std::memcpy(to.data, from, to.size_bytes());
  }
}

}  // namespace accelerate_cpp
