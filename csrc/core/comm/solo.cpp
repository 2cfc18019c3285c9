#include "core/comm/solo.h"

#include <cerrno>
#include <cstring>
#include <new>

#include "core/base/check.h"
#include "core/comm/arguments.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::align_val_t kAlignment{64};

void copy(ConstMemoryView from, MemoryView to) {
  if (from.data != to.data && from.count > 0) {
    std::memcpy(to.data, from.data, from.size_bytes());
  }
}

class HeapBuffer final : public Buffer {
 public:
  explicit HeapBuffer(std::size_t size_bytes) : data_(::operator new(size_bytes, kAlignment, std::nothrow)) {
    if (data_ == nullptr) {
      throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of memory", ENOMEM);
    }
    std::memset(data_, 0, size_bytes);
  }
  ~HeapBuffer() override { ::operator delete(data_, kAlignment); }
  HeapBuffer(const HeapBuffer&) = delete;
  HeapBuffer& operator=(const HeapBuffer&) = delete;
  void* data() override { return data_; }

 private:
  void* data_;
};

// The average over one rank is the gradient itself.
class SoloGradientExchange final : public GradientExchange {
 public:
  explicit SoloGradientExchange(const std::vector<BucketSpec>& buckets) {
    for (const BucketSpec& spec : buckets) {
      buffers_.push_back(std::make_unique<HeapBuffer>(spec.count * element_size(spec.dtype)));
      views_.push_back({buffers_.back()->data(), spec.count, spec.dtype});
      used_.emplace_back(spec.num_slots, std::uint8_t{0});
    }
  }
  MemoryView bucket(std::size_t index) override { return views_.at(index); }
  std::uint8_t* used_slots(std::size_t index) override { return used_.at(index).data(); }
  bool used_anywhere(std::size_t index, std::size_t slot) const override { return used_.at(index).at(slot) != 0; }
  void publish(std::size_t) override {}
  void progress() override {}
  void finish(Deadline) override {}

 private:
  std::vector<std::unique_ptr<HeapBuffer>> buffers_;
  std::vector<MemoryView> views_;
  std::vector<std::vector<std::uint8_t>> used_;
};

}  // namespace

void SoloCommunicator::check_usable() const {
  if (aborted_) {
    throw PeerLost("this communicator was aborted: " + reason_);
  }
}

void SoloCommunicator::all_reduce(MemoryView data, ReduceOp op, Deadline) {
  check_usable();
  check_reduction(data.dtype, op);
}

void SoloCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, ReduceOp op,
                                      Deadline) {
  check_usable();
  check_reduction(output.dtype, op);
  check_per_rank("reduce_scatter", output, inputs, 1);
  copy(inputs[0], output);
}

void SoloCommunicator::broadcast(MemoryView, int root, Deadline) {
  check_usable();
  check_root("broadcast", root, 1);
}

void SoloCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, Deadline) {
  check_usable();
  check_per_rank("all_gather", input, outputs, 1);
  copy(input, outputs[0]);
}

void SoloCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, Deadline) {
  check_usable();
  check_root("gather", root, 1);
  check_per_rank("gather", input, outputs, 1);
  copy(input, outputs[0]);
}

void SoloCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, Deadline) {
  check_usable();
  check_root("scatter", root, 1);
  check_per_rank("scatter", output, inputs, 1);
  copy(inputs[0], output);
}

void SoloCommunicator::barrier(Deadline) {
  check_usable();
}

std::shared_ptr<Buffer> SoloCommunicator::allocate(std::size_t size_bytes) {
  return std::make_shared<HeapBuffer>(size_bytes);
}

std::unique_ptr<GradientExchange> SoloCommunicator::gradient_exchange(const std::vector<BucketSpec>& buckets,
                                                                      Deadline) {
  check_usable();
  return std::make_unique<SoloGradientExchange>(buckets);
}

void SoloCommunicator::abort(const std::string& reason) noexcept {
  aborted_ = true;
  reason_ = reason;
}

}  // namespace accelerate_cpp::comm
