#include "core/comm/shm/shared_segments.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/base/open_files.h"
#include "core/base/round_up.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kAlignment = 64;

}  // namespace

class SharedSegments::Part final : public Buffer {
 public:
  // `count`, which may be null, is raised for as long as this lives.
  Part(std::shared_ptr<Segment> segment, std::size_t offset_bytes, std::shared_ptr<std::atomic<int>> count)
      : segment_(std::move(segment)), offset_bytes_(offset_bytes), count_(std::move(count)) {
    if (count_) {
      count_->fetch_add(1, std::memory_order_relaxed);
    }
  }
  ~Part() override {
    if (count_) {
      count_->fetch_sub(1, std::memory_order_release);
    }
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  void* data() override { return segment_->data() + offset_bytes_; }

 private:
  const std::shared_ptr<Segment> segment_;
  const std::size_t offset_bytes_;
  const std::shared_ptr<std::atomic<int>> count_;
};

SharedSegments& SharedSegments::of_process() {
  static SharedSegments* const instance =
      new SharedSegments;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

void SharedSegments::limit_descriptors_locked() {
  const auto too_many = [this] { return with_descriptor_.size() >= open_files_limit() / kShareOfDescriptors; };
  if (!too_many()) {
    return;
  }
  std::erase_if(with_descriptor_, [](const auto& entry) { return entry.expired(); });
  if (too_many()) {
    raise_open_files_limit();
  }
  while (!with_descriptor_.empty() && too_many()) {
    if (const std::shared_ptr<Segment> oldest = with_descriptor_.front().lock()) {
      oldest->close_descriptor();
    }
    with_descriptor_.pop_front();
  }
}

std::shared_ptr<Segment> SharedSegments::create_locked(std::size_t size_bytes) {
  limit_descriptors_locked();
  std::shared_ptr<Segment> segment = Segment::create(size_bytes);
  with_descriptor_.push_back(segment);
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
  by_address_[segment->data()] = segment;
  any_.store(true, std::memory_order_release);
  return segment;
}

std::shared_ptr<Buffer> SharedSegments::allocate(std::size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  if (size_bytes >= kOwnSegmentBytes) {
    return std::make_shared<Part>(create_locked(size_bytes), 0, nullptr);
  }
  const std::size_t rounded = round_up(std::max(size_bytes, std::size_t{1}), kAlignment);
  if (slab_.owner.forked()) {
    slab_ = {};
  }
  const bool unused = slab_.num_parts && slab_.num_parts->load(std::memory_order_acquire) == 0;
  if (unused && slab_.segment.use_count() == 1) {  // and no arena refers to it
    std::memset(slab_.segment->data(), 0, slab_.used_bytes);
    slab_.used_bytes = 0;
  }
  if (!slab_.segment || rounded > kSlabBytes - slab_.used_bytes) {
    slab_ = {create_locked(kSlabBytes), 0, {}, std::make_shared<std::atomic<int>>(0)};
  }
  const std::size_t offset = slab_.used_bytes;
  slab_.used_bytes += rounded;
  return std::make_shared<Part>(slab_.segment, offset, slab_.num_parts);
}

SharedSegments::Found SharedSegments::find(const void* data, std::size_t size_bytes) {
  if (!any_.load(std::memory_order_acquire)) {
    return {};
  }
  const std::lock_guard lock(mutex_);
  const auto* const begin = static_cast<const std::byte*>(data);
  const auto after = by_address_.upper_bound(begin);
  if (after == by_address_.begin()) {
    return {};
  }
  const auto& [start, known] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(begin - start);
  std::shared_ptr<Segment> segment = known.lock();
  if (!segment || offset > segment->size_bytes() || size_bytes > segment->size_bytes() - offset) {
    return {};
  }
  return {std::move(segment), offset};
}

}  // namespace accelerate_cpp::comm
