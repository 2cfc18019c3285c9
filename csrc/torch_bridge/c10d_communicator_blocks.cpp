// The operations of C10dCommunicator whose sizes only pairs of ranks know, messages, and the division of the group.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/heap_buffer.h"
#include "core/comm/solo.h"
#include "core/comm/split_choice.h"
#include "torch_bridge/c10d_communicator.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::chrono::seconds kLinger{10};

using Counts = std::vector<std::uint64_t>;

}  // namespace

void C10dCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root,
                              const Call& call) {
  check_root("gather", root, size_);
  const bool is_root = rank_ == root;
  if (is_root) {
    check_parts("gather", "output", outputs, input.dtype, size_);
    check_counts_equal("gather", input, outputs[static_cast<std::size_t>(rank_)]);
  }
  const Counts expected = counts_of(is_root ? outputs : std::vector<MemoryView>{}, size_);
  run({CallKind::kGather, input.dtype, ReduceOp::kSum, root, input.count, one_count(root, input.count, size_),
       expected},
      call, [&] {
        if (is_root) {
          Step step = gather_step(input, outputs);
          step.inputs = nothing(input.dtype);
          return run_step(std::move(step), call);
        }
        Inputs inputs = nothing(input.dtype);
        inputs[static_cast<std::size_t>(root)] = input;
        run_step({std::move(inputs), no_bytes(), [](const AllToAll&) {}}, call);
      });
}

void C10dCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root,
                               const Call& call) {
  check_root("scatter", root, size_);
  const bool is_root = rank_ == root;
  if (is_root) {
    check_parts("scatter", "input", inputs, output.dtype, size_);
    check_counts_equal("scatter", inputs[static_cast<std::size_t>(rank_)], output);
  }
  const Counts given = counts_of(is_root ? inputs : Inputs{}, size_);
  run({CallKind::kScatter, output.dtype, ReduceOp::kSum, root, output.count, given,
       one_count(root, output.count, size_)},
      call, [&] {
        Step step{is_root ? inputs : nothing(output.dtype), no_bytes(), {}};
        step.expected_bytes[static_cast<std::size_t>(root)] = is_root ? 0 : output.size_bytes();
        step.take = [&](const AllToAll& blocks) {
          copy_to(is_root ? inputs[static_cast<std::size_t>(rank_)].data : blocks.from(root), output);
        };
        run_step(std::move(step), call);
      });
}

void C10dCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                  const Call& call) {
  const DType dtype = inputs.empty() ? DType::kUInt8 : inputs.front().dtype;
  check_parts("all_to_all", "input", inputs, dtype, size_);
  check_parts("all_to_all", "output", outputs, dtype, size_);
  const ConstMemoryView own = inputs[static_cast<std::size_t>(rank_)];
  check_counts_equal("all_to_all", own, outputs[static_cast<std::size_t>(rank_)]);
  run({CallKind::kAllToAll, dtype, ReduceOp::kSum, -1, own.count, counts_of(inputs, size_), counts_of(outputs, size_)},
      call, [&] {
        Step step = gather_step(own, outputs);
        step.inputs = inputs;
        run_step(std::move(step), call);
      });
}

void C10dCommunicator::barrier(const Call& call) {
  run({CallKind::kBarrier}, call, [&] {
    if (!check_calls_) {  // the check ends when every rank has entered it
      all_gather_bytes("x", call);
    }
  });
}

std::shared_ptr<Transfer> C10dCommunicator::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                                 const Call& call) {
  return messages_->send(data, destination, tag, call);
}

std::shared_ptr<Transfer> C10dCommunicator::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  return messages_->receive(data, source, tag, call);
}

std::shared_ptr<Communicator> C10dCommunicator::split(int color, int key, const Call& call) {
  std::shared_ptr<Communicator> result;
  run({CallKind::kSplit}, call, [&] {
    const std::vector<int> members =
        agree_on_members({color, key}, [&](const std::string& own) { return all_gather_bytes(own, call); });
    const auto name = "split" + std::to_string(num_splits_++) + "/" + std::to_string(color);
    if (color < 0) {
      return;
    }
    if (members.size() == 1) {
      result = std::make_shared<SoloCommunicator>();
      return;
    }
    const auto place = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
    result = std::make_shared<C10dCommunicator>(
        std::make_shared<C10dEngine>(
            engine_->connect(), c10::make_intrusive<::c10d::PrefixStore>(name, engine_->store()),
            C10dEngine::Place{"engine", place, static_cast<int>(members.size()), engine_->share_hosts()},
            engine_->hooks().among(members)),
        check_calls_);
  });
  return result;
}

std::shared_ptr<Buffer> C10dCommunicator::allocate(std::size_t size_bytes) {
  return std::make_shared<HeapBuffer>(size_bytes);
}

bool C10dCommunicator::someone_has_left() {
  engine_->news().ask();
  return engine_->news().departure().has_value();
}

void C10dCommunicator::leave() noexcept {
  if (left_ || !engine_->is_usable()) {
    return;
  }
  left_ = true;
  try {
    if (!port_->flush(Deadline::after(kLinger))) {
      engine_->hooks().warn(engine_->who() +
                            " leaves although messages that it has sent were not received; they are lost");
    }
  } catch (const std::exception&) {  // what a hook throws is no reason to stay
  }
  engine_->leave(operation_.number, port_->num_sent());
}

void C10dCommunicator::abort(const std::string& reason) noexcept {
  engine_->fail(reason);
}

}  // namespace accelerate_cpp::comm
