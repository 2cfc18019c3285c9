#include "core/comm/copy.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace accelerate_cpp::comm {
namespace {

// Measured with two processes that fetch 256 KiB pieces on 32 MiB of third-level cache: at 8 MiB streaming is a fifth
// slower, at 12 MiB a third faster, from 100 MiB on twice as fast.
constexpr std::size_t kStreamingBytes = std::size_t{12} << 20;

#if defined(__SSE2__)
constexpr std::size_t kLineBytes = 64;

// Whole lines, in order: the processor gathers the stores to a line and writes it once. (Wider registers gain nothing.)
void stream_lines(std::byte* destination, const std::byte* source, std::size_t num_lines) {
  for (const std::byte* const end = source + num_lines * kLineBytes; source != end; source += kLineBytes) {
    const auto* const from = reinterpret_cast<const __m128i*>(source);
    auto* const to = reinterpret_cast<__m128i*>(destination);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
    destination += kLineBytes;
  }
  _mm_sfence();  // a release store alone does not order streaming stores
}

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t size_bytes) {
  const std::size_t before_line = -reinterpret_cast<std::uintptr_t>(destination) % kLineBytes;
  const std::size_t num_lines = size_bytes < before_line ? 0 : (size_bytes - before_line) / kLineBytes;
  const std::size_t head = num_lines == 0 ? size_bytes : before_line;
  std::memcpy(destination, source, head);
  stream_lines(destination + head, source + head, num_lines);
  const std::size_t done = head + num_lines * kLineBytes;
  std::memcpy(destination + done, source + done, size_bytes - done);
}
#endif

// Long enough to be streamed, short enough to be divided evenly.
constexpr std::size_t kDividedBytes = std::size_t{2} << 20;

std::vector<Copy> in_pieces(const std::vector<Copy>& copies) {
  std::vector<Copy> pieces;
  for (const Copy& whole : copies) {
    for (std::size_t begin = 0; begin < whole.size_bytes; begin += kDividedBytes) {
      pieces.push_back({static_cast<std::byte*>(whole.destination) + begin,
                        static_cast<const std::byte*>(whole.source) + begin,
                        std::min(kDividedBytes, whole.size_bytes - begin)});
    }
  }
  return pieces;
}

}  // namespace

Residency residency_of(std::size_t result_bytes) {
  return result_bytes < kStreamingBytes ? Residency::kCached : Residency::kStreamed;
}

void copy(void* destination, const void* source, std::size_t size_bytes, Residency residency) {
  if (size_bytes == 0) {
    return;  // the pointers may be null
  }
#if defined(__SSE2__)
  if (residency == Residency::kStreamed) {
    return copy_streaming(static_cast<std::byte*>(destination), static_cast<const std::byte*>(source), size_bytes);
  }
#endif
  static_cast<void>(residency);
  std::memcpy(destination, source, size_bytes);
}

void copy_all(const std::vector<Copy>& copies, int num_threads) {
  const std::vector<Copy> pieces = in_pieces(copies);
  std::size_t size_bytes = 0;
  for (const Copy& piece : pieces) {
    size_bytes += piece.size_bytes;
  }
  const Residency residency = residency_of(size_bytes);
  std::atomic<std::size_t> next{0};
  const auto work = [&pieces, residency, &next] {
    for (std::size_t index = next++; index < pieces.size(); index = next++) {
      copy(pieces[index].destination, pieces[index].source, pieces[index].size_bytes, residency);
    }
  };
  const std::size_t useful = std::min<std::size_t>(std::max(num_threads, 1), size_bytes / kDividedBytes);
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < useful) {
      helpers.emplace_back(work);
    }
  } catch (const std::system_error&) {  // those that there are copy the rest
  }
  work();
  for (std::thread& helper : helpers) {
    helper.join();
  }
}

}  // namespace accelerate_cpp::comm
