#include "core/comm/solo.h"

#include <utility>

#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/heap_buffer.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {
namespace {

void copy(const char* operation, ConstMemoryView from, MemoryView to) {
  check_counts_equal(operation, from, to);
  copy_to(from.data, to);
}

// A reduction over one operand: the operand, multiplied by its factor when there is one.
void reduce_one(const char* operation, ConstMemoryView from, MemoryView to, const Reduction& reduction) {
  check_reduction(to.dtype, reduction.op);
  check_counts_equal(operation, from, to);
  const void* source = from.data;
  void* destination = to.data;
  const double* const factors = reduction.op == ReduceOp::kPreMulSum ? &reduction.factor : nullptr;
  comm::reduce(to.dtype, reduction.op, {&source, 1, &destination, 1, to.count, 1.0, factors});
}

// The average over one rank is the gradient itself.
class SoloGradientExchange final : public GradientExchange {
 public:
  explicit SoloGradientExchange(const std::vector<BucketSpec>& buckets) {
    for (const BucketSpec& spec : buckets) {
      buffers_.push_back(std::make_unique<HeapBuffer>(spec.count * element_size(spec.dtype)));
      views_.push_back({buffers_.back()->data(), spec.count, spec.dtype});
      used_.emplace_back(spec.slots.size(), std::uint8_t{0});
    }
  }
  MemoryView bucket(std::size_t index) override { return views_.at(index); }
  std::uint8_t* used_slots(std::size_t index) override { return used_.at(index).data(); }
  bool used_anywhere(std::size_t index, std::size_t slot) const override { return used_.at(index).at(slot) != 0; }
  void begin(const RoundOptions& options, Deadline) override { weight_ = checked_weight(options.weight.value_or(1.0)); }
  std::optional<amp::GradientStatistics> statistics(std::size_t, std::size_t) const override { return std::nullopt; }
  double divisor() const override { return divisor_; }
  void publish(std::size_t) override {}
  void progress() override {}
  void finish(Deadline) override {
    divisor_ = std::exchange(weight_, 1.0);
    for (const MemoryView& view : divisor_ == 1.0 ? std::vector<MemoryView>() : views_) {
      void* data = view.data;
      comm::reduce(view.dtype, ReduceOp::kAvg, {&data, 1, &data, 1, view.count, inverse(divisor_)});
    }
  }

 private:
  std::vector<std::unique_ptr<HeapBuffer>> buffers_;
  std::vector<MemoryView> views_;
  std::vector<std::vector<std::uint8_t>> used_;
  double weight_ = 1.0;
  double divisor_ = 1.0;  // of the finished round
};

}  // namespace

void SoloCommunicator::check_usable() const {
  if (aborted_) {
    throw PeerLost("this communicator was aborted: " + reason_);
  }
}

void SoloCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call&) {
  check_usable();
  reduce_one("all_reduce", data, data, reduction);
}

void SoloCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call&) {
  check_usable();
  check_root("reduce", root, 1);
  reduce_one("reduce", data, data, reduction);
}

void SoloCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                      Reduction reduction, const Call&) {
  check_usable();
  check_parts("reduce_scatter", "input", inputs, output.dtype, 1);
  reduce_one("reduce_scatter", inputs[0], output, reduction);
}

void SoloCommunicator::broadcast(MemoryView, int root, const Call&) {
  check_usable();
  check_root("broadcast", root, 1);
}

void SoloCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call&) {
  check_usable();
  check_parts("all_gather", "output", outputs, input.dtype, 1);
  copy("all_gather", input, outputs[0]);
}

void SoloCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call&) {
  check_usable();
  check_root("gather", root, 1);
  check_parts("gather", "output", outputs, input.dtype, 1);
  copy("gather", input, outputs[0]);
}

void SoloCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call&) {
  check_usable();
  check_root("scatter", root, 1);
  check_parts("scatter", "input", inputs, output.dtype, 1);
  copy("scatter", inputs[0], output);
}

void SoloCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                  const Call&) {
  check_usable();
  check_parts("all_to_all", "input", inputs, inputs.empty() ? DType::kUInt8 : inputs[0].dtype, 1);
  check_parts("all_to_all", "output", outputs, inputs[0].dtype, 1);
  copy("all_to_all", inputs[0], outputs[0]);
}

void SoloCommunicator::barrier(const Call&) {
  check_usable();
}

std::shared_ptr<Transfer> SoloCommunicator::send(ConstMemoryView, int destination, std::uint64_t, const Call&) {
  throw InvalidArgument("send: rank " + std::to_string(destination) + " is not another rank of this group of 1");
}

std::shared_ptr<Transfer> SoloCommunicator::receive(MemoryView, int source, std::uint64_t, const Call&) {
  throw InvalidArgument("receive: rank " + std::to_string(source) + " is not another rank of this group of 1");
}

std::shared_ptr<Communicator> SoloCommunicator::split(int color, int, const Call&) {
  check_usable();
  return color < 0 ? nullptr : std::make_shared<SoloCommunicator>();
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
