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

}  // namespace

void SoloCommunicator::check_usable(const char* operation) const {
  failure_.check(operation, 0);
}

void SoloCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call&) {
  check_usable("all_reduce");
  reduce_one("all_reduce", data, data, reduction);
}

void SoloCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call&) {
  check_usable("reduce");
  check_root("reduce", root, 1);
  reduce_one("reduce", data, data, reduction);
}

void SoloCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                      Reduction reduction, const Call&) {
  check_usable("reduce_scatter");
  check_parts("reduce_scatter", "input", inputs, output.dtype, 1);
  reduce_one("reduce_scatter", inputs[0], output, reduction);
}

void SoloCommunicator::broadcast(MemoryView, int root, const Call&) {
  check_usable("broadcast");
  check_root("broadcast", root, 1);
}

void SoloCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call&) {
  check_usable("all_gather");
  check_parts("all_gather", "output", outputs, input.dtype, 1);
  copy("all_gather", input, outputs[0]);
}

void SoloCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call&) {
  check_usable("gather");
  check_root("gather", root, 1);
  check_parts("gather", "output", outputs, input.dtype, 1);
  copy("gather", input, outputs[0]);
}

void SoloCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call&) {
  check_usable("scatter");
  check_root("scatter", root, 1);
  check_parts("scatter", "input", inputs, output.dtype, 1);
  copy("scatter", inputs[0], output);
}

void SoloCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                  const Call&) {
  check_usable("all_to_all");
  check_parts("all_to_all", "input", inputs, inputs.empty() ? DType::kUInt8 : inputs[0].dtype, 1);
  check_parts("all_to_all", "output", outputs, inputs[0].dtype, 1);
  copy("all_to_all", inputs[0], outputs[0]);
}

void SoloCommunicator::barrier(const Call&) {
  check_usable("barrier");
}

std::shared_ptr<Transfer> SoloCommunicator::send(ConstMemoryView, int destination, std::uint64_t, const Call&) {
  throw InvalidArgument("send: rank " + std::to_string(destination) + " is not another rank of this group of 1");
}

std::shared_ptr<Transfer> SoloCommunicator::receive(MemoryView, int source, std::uint64_t, const Call&) {
  throw InvalidArgument("receive: rank " + std::to_string(source) + " is not another rank of this group of 1");
}

std::shared_ptr<Communicator> SoloCommunicator::split(int color, int, const Call&) {
  check_usable("split");
  return color < 0 ? nullptr : std::make_shared<SoloCommunicator>();
}

std::shared_ptr<Buffer> SoloCommunicator::allocate(std::size_t size_bytes) {
  return std::make_shared<HeapBuffer>(size_bytes);
}

std::shared_ptr<Buffer> SoloCommunicator::window(std::size_t size_bytes, const Call&) {
  check_usable("window");
  return std::make_shared<HeapBuffer>(size_bytes);
}

void SoloCommunicator::abort(const std::string& reason) noexcept {
  failure_.set(reason);
}

}  // namespace accelerate_cpp::comm
